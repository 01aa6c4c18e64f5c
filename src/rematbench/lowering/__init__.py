"""Plan -> actions: `lower`, and what it is made of: fates, operators of a chunk, blocks."""
