"""Inverse questions and price tags: searches in a row, each no longer than its answer needs."""

from collections.abc import Iterator
from contextlib import closing
from math import inf
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from rematbench.search.halves import Progress, rounds
from rematbench.search.job import Asked
from rematbench.search.trial import Tried
from rematbench.spec.cluster import Cluster
from rematbench.spec.configfile import ConfigError
from rematbench.spec.layout import LayoutError
from rematbench.spec.load import load_cluster

Question = Literal["gpus", "context", "batch", "memory"]

GIB = 2**30
GRANULE = 1024
"""Tokens: lengths are multiples."""

FINE = 16
"""A longest length, a largest batch and least memory are found to one part in so many."""

MOST_ROUNDS, HALVINGS = 6, 3
"""Rounds of a search whether anything fits with a change, and how often a change is made smaller: a
plan that is found fits; where none is, there may be one all the same."""

MORE_GIB = (1, 4, 16)
RATES = {
    "PCIe": "pcie_bytes_per_s",
    "NVLink": "nvlink_bytes_per_s",
    "NIC": "nic_bytes_per_s",
    "host DRAM": "dram_bytes_per_s",
}
FASTER = 1.1


class Answer(Struct, frozen=True):
    """One value that was tried, and the plan that reaches what was asked; None: no plan does."""

    value: int
    tried: Tried | None


class Change(Struct, frozen=True):
    """A change in words, and a plan that fits with it."""

    change: str
    tried: Tried


class Price(Struct, frozen=True):
    """A change of the machine, and the fastest step with it."""

    change: str
    step_s: float


def reached(
    asked: Asked, step_s: float, processes: int, most_rounds: int | None = None
) -> Tried | None:
    """A plan whose step is no longer than that; None where the search proves that there is none,
    comes as near as its gap, or has found none after so many rounds."""
    try:
        going = rounds(asked, shown=1, processes=processes, most_rounds=most_rounds)
        with closing(going) as found:
            for at in found:
                if at.found and at.best_s <= step_s:
                    return at.found[0]
                if at.bound_s > step_s:
                    return None
    except LayoutError:
        return None
    return None


def fewest_gpus(asked: Asked, tokens_per_s: float, processes: int) -> Iterator[Answer]:
    """Twice as many GPUs each time, up to those of the problem, until all together make so many
    tokens a second."""
    spec = asked.spec
    counts = [1 << power for power in range(spec.gpus.bit_length()) if 1 << power < spec.gpus]
    for gpus in (*counts, spec.gpus):
        step_s = spec.global_batch * spec.seq_len / tokens_per_s
        there = replace(asked, spec=replace(spec, gpus=gpus))
        found = reached(there, step_s, processes)
        yield Answer(gpus, found)
        if found:
            return


def longest_context(asked: Asked, processes: int) -> Iterator[Answer]:
    """Lengths from the problem's on: twice as long until nothing fits, then between."""

    def fits(seq_len: int) -> Tried | None:
        return reached(replace(asked, spec=replace(asked.spec, seq_len=seq_len)), inf, processes)

    yield from _largest(fits, asked.spec.seq_len, GRANULE)


def largest_batch(asked: Asked, step_s: float, processes: int) -> Iterator[Answer]:
    """Multiples of the problem's global batch whose step takes no longer than that."""
    batch = asked.spec.global_batch

    def quick(global_batch: int) -> Tried | None:
        there = replace(asked, spec=replace(asked.spec, global_batch=global_batch))
        return reached(there, step_s, processes)

    yield from _largest(quick, batch, batch)


def least_memory(asked: Asked, lose: float, processes: int) -> Iterator[Answer]:
    """Bytes of a device with which a plan's step is longer by no more than this share than the best
    with all of them; the device's own first."""
    hbm = asked.spec.hbm_bytes or _cluster(asked).hbm_bytes
    best = fastest(asked, processes)
    yield Answer(hbm, best)
    if best is None:
        return
    enough, short = hbm, 0
    while enough - short > max(GIB // 4, enough // FINE):
        middle = (enough + short) // 2
        there = replace(asked, spec=replace(asked.spec, hbm_bytes=middle))
        try:
            found = reached(there, best.step_s * (1.0 + lose), processes)
        except ConfigError:  # less than what stays free
            found = None
        yield Answer(middle, found)
        enough, short = (middle, short) if found else (enough, middle)


def fastest(asked: Asked, processes: int) -> Tried | None:
    """The fastest plan, within the gap."""
    *_, end = rounds(asked, shown=1, processes=processes)
    return end.found[0] if end.found else None


def _largest(reach: Any, start: int, granule: int) -> Iterator[Answer]:
    """Values on the way to the largest that is reached: doubled, then bisected."""
    value, found = start, reach(start)
    yield Answer(value, found)
    if found is None:
        return
    while found is not None:
        value, low = 2 * value, value
        found = reach(value)
        yield Answer(value, found)
    high = value
    while high - low > max(granule, low // FINE):
        middle = (low + high) // 2 // granule * granule
        found = reach(middle)
        yield Answer(middle, found)
        low, high = (middle, high) if found else (low, middle)


def would_fit(asked: Asked, at: Progress, processes: int) -> Iterator[Change]:
    """Where no plan fits: more memory of the device, of the host if some plan lacked that, and more
    GPUs; each the smallest of a few that were tried with which a plan was found."""

    def fits(**changes: Any) -> Tried | None:
        there = replace(asked, spec=replace(asked.spec, **changes))
        return reached(there, inf, processes, MOST_ROUNDS)

    spec, cluster = asked.spec, _cluster(asked)
    hbm = spec.hbm_bytes or cluster.hbm_bytes
    more, found = 0, None
    if at.short_bytes < inf:  # else no plan lacks bytes of a device
        more, found = _enough(lambda nbytes: fits(hbm_bytes=hbm + nbytes), at.short_bytes, 4 * hbm)
    if found:
        yield Change(f"with {more / GIB:.1f} GiB more on each device", found)
    if any(reason.startswith("host") and count for reason, count in at.fell.items()):
        larger = replace(cluster, host_bytes=2 * cluster.host_bytes)
        if found := fits(cluster=larger):
            yield Change(f"with twice the {cluster.host_bytes / GIB:.0f} GiB of each host", found)
    for times in (2, 4):
        if found := fits(gpus=times * spec.gpus):
            yield Change(f"on {times * spec.gpus} GPUs", found)
            return


def _enough(reach: Any, least: float, most: int) -> tuple[int, Tried | None]:
    """Bytes with which a plan is found, more than the `least` that all plans lack: doubled until
    one is, then halved towards it, in `HALVINGS`."""
    short, enough = int(least), 2 * max(int(least), GIB // 8)
    found = reach(enough)
    while found is None and enough < most:
        short, enough = enough, 2 * enough
        found = reach(enough)
    for _ in range(HALVINGS if found else 0):
        middle = (short + enough) // 2
        better = reach(middle)
        short, enough, found = (short, middle, better) if better else (middle, enough, found)
    return enough, found


def prices(asked: Asked, processes: int) -> Iterator[Price]:
    """The step with more memory, and with faster links; as it is first."""
    yield Price("as it is", _step_s(asked, processes))
    for change, cluster in _changes(asked):
        there = replace(asked, spec=replace(asked.spec, cluster=cluster, hbm_bytes=None))
        yield Price(change, _step_s(there, processes))


def _step_s(asked: Asked, processes: int) -> float:
    found = fastest(asked, processes)
    return found.step_s if found else inf


def _changes(asked: Asked) -> Iterator[tuple[str, Cluster]]:
    cluster = _cluster(asked)
    if asked.spec.hbm_bytes is not None:
        cluster = replace(cluster, hbm_bytes=asked.spec.hbm_bytes)
    for name, field in (("device", "hbm_bytes"), ("host", "host_bytes")):
        for more in MORE_GIB:
            larger = {field: getattr(cluster, field) + more * GIB}
            yield f"+{more} GiB of {name} memory", replace(cluster, **larger)
    for name, field in RATES.items():
        rate = getattr(cluster, field)
        if rate is not None:
            yield f"+10 % of {name}", replace(cluster, **{field: FASTER * rate})


def _cluster(asked: Asked) -> Cluster:
    given = asked.spec.cluster
    return given if isinstance(given, Cluster) else load_cluster(given)
