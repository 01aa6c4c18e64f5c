"""Real packages: their processes, limits and options."""
