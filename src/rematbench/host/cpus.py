"""Lists of CPUs as the Linux kernel writes them."""


def cpu_set(listing: str) -> set[int]:
    """The CPU numbers of a kernel list such as `0-3,8`."""
    found: set[int] = set()
    for part in listing.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
