"""The candidates of comparisons and searches: methods, layouts, and trials of plans."""
