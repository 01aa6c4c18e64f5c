"""Costs: the operators of a model, and the seconds and bytes of each."""
