"""Kernel rates refitted from published tables."""
