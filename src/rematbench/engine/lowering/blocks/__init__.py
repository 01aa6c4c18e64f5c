"""What every emitter uses: a chunk's operators and fates, and the writer of a block."""
