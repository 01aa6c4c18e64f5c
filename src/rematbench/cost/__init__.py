"""Costs in seconds and bytes: the only arithmetic on FLOPs and link rates in the project."""
