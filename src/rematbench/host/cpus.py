"""The kernel's lists of CPUs."""


def cpu_set(listing: str) -> set[int]:
    """The kernel's `0-3,8` as a set."""
    found: set[int] = set()
    for part in listing.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
