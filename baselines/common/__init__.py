"""What the baselines share: processes, weights and batches by name, bytes."""
