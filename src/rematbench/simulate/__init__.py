"""Simulated seconds: op level, (max, +) chunk level, and the breakdown of a step's time."""
