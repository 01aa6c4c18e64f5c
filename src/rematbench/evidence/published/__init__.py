"""Published cells as problems and methods."""
