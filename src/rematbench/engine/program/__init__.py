"""Actions, the program of a rank, and the bytes of a program."""
