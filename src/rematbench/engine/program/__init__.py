"""Actions, the program of a rank, and its bytes."""
