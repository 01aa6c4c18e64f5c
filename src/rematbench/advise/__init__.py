"""Advice: which method, which layout."""
