"""Published rows, the constants fitted to them, errors and bands."""
