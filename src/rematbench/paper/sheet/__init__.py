"""Tables as DataFrames under a sheet of columns."""

SUFFIXES = (".csv", ".json", ".md", ".tex")
"""The suffixes of a table's files."""
