"""Runs as data: suites, records, the store of finished cells, and which code made them."""
