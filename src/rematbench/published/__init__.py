"""Published cells: read, predicted, compared; what accuracy is promised, and how it is scored."""
