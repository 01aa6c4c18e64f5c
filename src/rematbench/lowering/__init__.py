"""What `rematbench.lower` is made of: fates, a chunk's operators, and the blocks of actions."""
