"""Simulation: from actions and costs to times."""
