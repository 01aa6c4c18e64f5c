"""The grand matrix: every method at every size and length, simulated, and its tables."""
