"""Inverse questions, such as the fewest GPUs, each answered by a series of short searches."""

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from math import ceil, inf
from typing import Any, Literal

from msgspec.structs import replace

from rematbench.advise.search.job import SearchSpace
from rematbench.advise.search.request import MINUTE, Progress, Rounds, SearchRequest
from rematbench.evaluate.result import Result
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.load import load_cluster
from rematbench.plugins.registry import MethodError
from rematbench.solve.search import brackets, middle, twice

Question = Literal["gpus", "context", "batch", "memory", "rank", "base"]


GIB = 2**30
GRANULE = 1024
"""Sequence lengths that are tried are multiples of this many tokens."""
FINE = 16
"""The longest length, largest batch and least memory are found to one part in FINE."""
MOST_ROUNDS, HALVINGS = MINUTE, 3
"""The most rounds of a search for a plan that fits with a change, and how often the change is
halved.  If such a search returns no plan, one may still exist."""
LOOK = 1
"""The rounds of a short search for a plan that fits."""
Answer = tuple[int, Result | None]
"""A value that was tried, and a plan that reaches the goal with it (None: there is none)."""


def reached(
    request: SearchRequest, step_s: float, run: Rounds, most_rounds: int | None = None
) -> Result | None:
    """A plan whose step takes at most `step_s`; None if the search proves that there is none, or
    does not find one in `most_rounds`.  If `step_s` is infinite, any plan that fits will do, and no
    seconds are bounded."""
    request = replace(request, any_fit=step_s == inf, within=0.0)
    if not _has_layout(request):  # otherwise a worker would raise the error
        return None
    going = run(request, shown=1, most_rounds=most_rounds)
    with closing(going) as result:
        for at in result:
            if at.results and at.best_s <= step_s:
                return at.results[0]
            if at.bound_s > step_s:
                return None
    return None


def fewest_gpus(request: SearchRequest, tokens_per_s: float, run: Rounds) -> Iterator[Answer]:
    """Yield an answer for 1, 2, 4, ... GPUs, up to the job's number, until all GPUs together reach
    `tokens_per_s`.  Then try the whole numbers of nodes (inside a node: of GPUs) between the last
    two, until one reaches the speed."""
    spec = request.spec

    def reach(gpus: int) -> Answer:
        return gpus, reached(_with_gpus(request, gpus), step_s, run)

    step_s = spec.degrees.global_batch * spec.work.seq_len / tokens_per_s
    counts = [1 << power for power in range(spec.gpus.bit_length()) if 1 << power < spec.gpus]
    for before, gpus in pairwise((0, *counts, spec.gpus)):
        enough = reach(gpus)
        yield enough
        if enough[1] is None:
            continue
        for fewer in _between(request, before, gpus):
            answer = reach(fewer)
            yield answer
            if answer[1]:
                break
        return


def _between(request: SearchRequest, before: int, gpus: int) -> Iterator[int]:
    """The numbers of GPUs between `before` and `gpus` that fill whole nodes (or lie inside one
    node) and have a layout, in ascending order."""
    node = _cluster(request).gpus_per_node
    for count in range(before + 1, gpus):
        if count % (node if count > node else 1) == 0 and _has_layout(_with_gpus(request, count)):
            yield count


def _with_gpus(request: SearchRequest, gpus: int) -> SearchRequest:
    return replace(request, spec=request.spec.changed(gpus=gpus))


def _has_layout(request: SearchRequest) -> bool:
    try:
        SearchSpace(request).ready()
    except (LayoutError, MethodError):  # no layout remains for the engine
        return False
    return True


def longest_context(request: SearchRequest, run: Rounds) -> Iterator[Answer]:
    """Yield answers for sequence lengths from the job's length on: doubled until no plan fits, then
    bisected.  A length counts as having no plan if a short search finds none.  Only the shortest
    such length gets a full search; if that finds a plan, the bisection is repeated."""

    def fits(seq_len: int, most_rounds: int | None = None) -> Result | None:
        there = replace(request, spec=request.spec.changed(seq_len=seq_len))
        return reached(there, inf, run, most_rounds)

    known: dict[int, Result | None] = {}

    def look(seq_len: int) -> Result | None:
        if seq_len not in known:
            known[seq_len] = fits(seq_len, LOOK)
        return known[seq_len]

    said: set[int] = set()
    while True:
        short = inf
        for answer in _largest(look, request.spec.work.seq_len, GRANULE):
            if answer[1] is None:
                short = min(short, answer[0])
            elif answer[0] not in said:
                said.add(answer[0])
                yield answer
        known[int(short)] = fits(int(short))
        if known[int(short)] is None:
            yield int(short), None
            return


def largest_batch(request: SearchRequest, step_s: float, run: Rounds) -> Iterator[Answer]:
    """Yield answers for multiples of the job's global batch, with steps of at most `step_s`."""
    batch = request.spec.degrees.global_batch

    def quick(global_batch: int) -> Result | None:
        there = replace(request, spec=request.spec.changed(global_batch=global_batch))
        return reached(there, step_s, run)

    yield from _largest(quick, batch, batch)


def largest_rank(request: SearchRequest, run: Rounds) -> Iterator[Answer]:
    """Yield answers for ranks of adapters, from the job's rank on."""

    def look(rank: int) -> Result | None:
        return reached(replace(request, spec=request.spec.changed(lora_rank=rank)), inf, run)

    yield from _largest(look, max(1, request.spec.work.lora_rank), 1)


BASES = {"stack": 0, "int8": 8, "nf4_double": 4}
"""Formats of frozen weights, the widest first, with their bits (0: the bits of the precision)."""


def widest_base(request: SearchRequest, run: Rounds) -> Iterator[Answer]:
    """Yield (bits of frozen weights, result of the search with them), until a plan fits."""
    for name, bits in BASES.items():
        there = replace(request, spec=request.spec.changed(base_dtype=name))
        result = reached(there, inf, run)
        yield bits or 8 * request.spec.work.element_bytes, result
        if result is not None:
            return


def min_memory(request: SearchRequest, lose: float, run: Rounds) -> Iterator[Answer]:
    """Yield answers for bytes of device memory, bisected from the full memory down.  Steps may be
    longer than the best step with the full memory by the share `lose`."""
    hbm = request.spec.stack.hbm_bytes or _cluster(request).hbm_bytes
    best = fastest(request, run)
    yield hbm, best
    if best is None:
        return

    def quick(hbm_bytes: int) -> Result | None:
        there = replace(request, spec=request.spec.changed(hbm_bytes=hbm_bytes))
        try:
            return reached(there, best.fitting_s * (1.0 + lose), run)
        except ConfigError:  # the memory is smaller than the reserve
            return None

    def between(short: int, enough: int) -> int | None:
        return middle(short, enough) if enough - short > max(GIB // 4, enough // FINE) else None

    yield from _answers(quick, 0, hbm, between=between)


def fastest(request: SearchRequest, run: Rounds) -> Result | None:
    """The fastest plan, to within the gap of `request`; None if no plan fits."""
    *_, end = run(request, shown=1)
    return end.results[0] if end.results else None


def _largest(reach: Any, start: int, granule: int) -> Iterator[Answer]:
    """Answers on the way to the largest value for which `reach` returns a plan: values are doubled,
    then bisected to multiples of `granule`."""

    def between(low: int, high: int) -> int | None:
        wide = low and high - low > max(granule, low // FINE)  # low 0: even `start` has no plan
        return (low + high) // 2 // granule * granule if wide else None

    yield from _answers(reach, 0, start, largest=True, further=twice, between=between)


def _answers(
    reach: Any, low: int, high: int, *, largest: bool = False, **how: Any
) -> Iterator[Answer]:
    """The answer for each value that `brackets` tries on the way to the lowest (or `largest`) value
    for which `reach` returns a plan; `how` goes to `brackets`."""
    tried: list[Answer] = []

    def turns(value: int) -> bool:
        tried.append((value, reach(value)))
        return (tried[-1][1] is None) == largest

    for _ in brackets(turns, low, high, **how):
        yield tried[-1]


def would_fit(request: SearchRequest, at: Progress, run: Rounds) -> Iterator[tuple[str, Result]]:
    """For a search without a plan that fits, yield changes in words, each with a plan that then
    fits: no memory margin, more device memory, more host memory if a plan lacked it, and more GPUs.
    Of each kind, only the smallest change that has a plan is yielded."""

    def fits(**changes: Any) -> Result | None:
        there = replace(request, spec=request.spec.changed(**changes))
        return reached(there, inf, run, MOST_ROUNDS)

    spec, cluster = request.spec, _cluster(request)
    hbm = spec.stack.hbm_bytes or cluster.hbm_bytes
    if at.short_bytes < inf:  # if infinite, no plan lacked device memory
        tight = replace(request, reserve_gib=0.0)
        if request != tight and (result := reached(tight, inf, run, MOST_ROUNDS)):
            yield "tightly, within our memory error (--reserve-gib 0)", result
        more = _enough(lambda nbytes: fits(hbm_bytes=hbm + nbytes), at.short_bytes, 4 * hbm)
        if more[1]:
            least_gib = ceil(100 * more[0] / GIB) / 100
            yield f"with at most {least_gib:.2f} GiB more memory on each device", more[1]
    if any(reason.startswith("host") and count for reason, count in at.excluded.items()):
        larger = replace(cluster, host_bytes=2 * cluster.host_bytes)
        if result := fits(cluster=larger):
            yield f"with twice the {cluster.host_bytes / GIB:.0f} GiB of host memory", result
    for times in (2, 4):
        if result := fits(gpus=times * spec.gpus):
            yield f"on at most {times * spec.gpus} GPUs", result
            return


def _enough(reach: Any, least: float, most: int) -> Answer:
    """The fewest further bytes with which `reach` returns a plan: doubled until a plan fits or
    `most` is reached, then bisected HALVINGS times.  Every plan lacks at least `least` bytes."""
    halvings = iter(range(HALVINGS))
    best: Answer = 0, None

    def between(short: int, enough: int) -> int | None:
        return None if next(halvings, None) is None else middle(short, enough)

    low, high = int(least), 2 * max(int(least), GIB // 8)
    for answer in _answers(reach, low, high, further=twice, most=most, between=between):
        best = answer if answer[1] else best
    return best


def _cluster(request: SearchRequest) -> Cluster:
    given = request.spec.cluster
    return given if isinstance(given, Cluster) else load_cluster(given)
