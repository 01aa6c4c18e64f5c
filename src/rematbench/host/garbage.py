"""Python's cyclic garbage collector, for commands that lower many plans."""

import gc


def collect_rarely() -> None:
    """Make collections rare.  Programs are large and free of cycles: scanning them takes a quarter
    to a half of a command's time and finds nothing."""
    gc.set_threshold(500_000, 50, 50)
