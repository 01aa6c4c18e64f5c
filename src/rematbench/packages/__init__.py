"""Real training packages: run them, size the tensors that they keep, compare their numbers."""
