"""Measurements of one GPU."""
