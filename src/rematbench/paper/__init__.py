"""Studies, claims, the matrix, tables and the page."""
