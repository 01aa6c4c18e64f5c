"""rematbench: activation memory in large-model training, compared on the same work."""

__version__ = "0.1.0"
