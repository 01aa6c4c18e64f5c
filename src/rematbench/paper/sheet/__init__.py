"""Tables as DataFrames under a sheet of columns."""
