"""Seconds and bytes: the only arithmetic on FLOPs and links in the project."""
