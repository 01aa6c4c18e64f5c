"""What comparisons and searches try: methods, layouts, and trials of plans."""
