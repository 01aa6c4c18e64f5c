"""The memory of this host, and the memory that this process may use."""

import re
from pathlib import Path


def meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """The entries of /proc/meminfo by name, in bytes."""
    entries = re.findall(r"^(.+):\s+(\d+) kB$", path.read_text(encoding="ascii"), re.MULTILINE)
    return {key: int(number) * 1024 for key, number in entries}


def cgroup_limit(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """The lowest memory limit in bytes that this process's control groups (v1 or v2) and their
    parents set; -1 without a limit."""
    limits = []
    try:
        lines = membership.read_text(encoding="ascii").splitlines()
    except OSError:
        return -1
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root / controllers if controllers else root
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place == base.parent:
                break
            limits.append(_limit(place / name))
    return min((limit for limit in limits if limit >= 0), default=-1)


def _limit(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return -1
    no_limit = 1 << 60  # v1 writes a huge number, v2 `max`
    return int(text) if text.isdigit() and int(text) < no_limit else -1


def free_bytes() -> int:
    """Bytes that this process and its children may still use: the host's available memory, capped
    at the limit of the control groups; -1 if the kernel does not report it."""
    try:
        found = meminfo().get("MemAvailable", -1)
    except OSError:
        return -1
    limit = cgroup_limit()
    return found if limit < 0 else min(found, limit)


def cpu_set(listing: str) -> set[int]:
    """The CPU numbers of a kernel list such as `0-3,8`."""
    found: set[int] = set()
    for part in listing.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
