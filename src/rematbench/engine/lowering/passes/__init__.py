"""The forward and backward passes of a chunk."""
