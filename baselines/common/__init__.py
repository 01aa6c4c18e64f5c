"""Shared code of the baselines: processes, weights and batches by name, and counting of bytes."""
