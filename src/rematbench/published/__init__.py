"""Published cells: their sheets, their predictions, and how the predictions are scored."""
