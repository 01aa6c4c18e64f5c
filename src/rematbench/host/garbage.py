"""Python's cyclic garbage collector, for commands that lower many plans."""

import gc


def collect_rarely() -> None:
    """Programs are large and free of cycles: scanning them over and over takes a quarter to a half
    of the time of a command, and finds nothing."""
    gc.set_threshold(500_000, 50, 50)
