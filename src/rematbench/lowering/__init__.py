"""Plan -> actions: `lower` and its parts: fates, the operators of a chunk, blocks."""
