"""The questions of papers, answered."""
