"""Records of runs, and the store of finished cells."""
