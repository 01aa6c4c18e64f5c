"""The simulated, traced and executed worlds: run a cell, measure it, compare its records."""
