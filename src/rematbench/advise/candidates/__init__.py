"""What a comparison and a search try: methods, layouts, trials."""
