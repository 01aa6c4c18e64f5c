"""A chunk's operators and fates, and the writer of a block, which all emitters use."""
