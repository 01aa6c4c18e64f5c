"""Costs: the operators of a model, with their seconds and bytes."""
