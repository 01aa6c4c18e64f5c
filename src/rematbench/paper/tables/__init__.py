"""A file for each table."""
