"""Offline dynamic storage allocation: fixed offsets for tensors with fixed lifetimes.

Best fit runs first, in several orders.  If it misses the lower bound of live bytes, a mixed-integer
programme (HiGHS) follows, as in MEMO (Zhao et al., arXiv 2407.12117, section 4.3): minimise M
subject to A_i + S_i <= M and, for each pair with overlapping lifetimes, A_i + S_i <= A_j + (1 -
z_ij) C and A_j + S_j <= A_i + z_ij C (offsets A, sizes S, capacity C, binary z).  Nodes and pairs
are limited, not seconds, so that the result is the same on every machine.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rematbench.solve.solver import Row, minimum

MAX_PAIRS = 600
MAX_NODES = 200
ROUNDS = 12


class Tensor(NamedTuple):
    """A tensor's bytes, alive from `start` until before `end` (any integer clock)."""

    nbytes: int
    start: int
    end: int


class Packing(Struct, frozen=True, kw_only=True):
    offsets: tuple[int, ...]
    peak_bytes: int
    lower_bound_bytes: int
    solver: Literal["best_fit", "milp"]


def live_peak(tensors: Iterable[Tensor]) -> int:
    """The peak of live bytes: a lower bound of every packing."""
    deltas: dict[int, int] = {}
    for tensor in tensors:
        deltas[tensor.start] = deltas.get(tensor.start, 0) + tensor.nbytes
        deltas[tensor.end] = deltas.get(tensor.end, 0) - tensor.nbytes
    live = peak = 0
    for at in sorted(deltas):
        live += deltas[at]
        peak = max(peak, live)
    return peak


def best_fit(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Offsets by best fit: each tensor goes into the smallest gap between tensors whose lifetimes
    overlap with its own.  Three orders are tried (largest first, largest area first, earliest
    first).  Each order is improved by moving the tensors that end at the peak to its front."""
    bound, beside = live_peak(tensors), _beside(tensors)
    starts = (
        sorted(range(len(tensors)), key=lambda i: (-tensors[i].nbytes, tensors[i].start, i)),
        sorted(range(len(tensors)), key=lambda i: (-_area(tensors[i]), tensors[i].start, i)),
        sorted(range(len(tensors)), key=lambda i: (tensors[i].start, -tensors[i].nbytes, i)),
    )
    best: tuple[int, ...] = ()
    lowest = -1
    for start in starts:
        order = start
        for _ in range(ROUNDS):
            offsets = _fit(tensors, order, beside)
            peak = _peak(tensors, offsets)
            if lowest < 0 or peak < lowest:
                best, lowest = offsets, peak
            if lowest <= bound:
                return best
            tops = {i for i, t in enumerate(tensors) if offsets[i] + t.nbytes == peak}
            order = [*sorted(tops), *(i for i in order if i not in tops)]
    return best


def _area(tensor: Tensor) -> int:
    return tensor.nbytes * (tensor.end - tensor.start)


def _peak(tensors: Sequence[Tensor], offsets: Sequence[int]) -> int:
    return max((o + t.nbytes for o, t in zip(offsets, tensors, strict=True)), default=0)


def _fit(
    tensors: Sequence[Tensor], order: Sequence[int], beside: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    spans: list[tuple[int, int] | None] = [None] * len(tensors)
    offsets = [0] * len(tensors)
    for index in order:
        nbytes = tensors[index].nbytes
        taken = sorted([span for other in beside[index] if (span := spans[other]) is not None])
        offset = _smallest_gap(taken, nbytes)
        spans[index] = offset, offset + nbytes
        offsets[index] = offset
    return tuple(offsets)


def _beside(tensors: Sequence[Tensor]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in tensors]
    alive: list[int] = []
    for index in sorted(range(len(tensors)), key=lambda i: tensors[i].start):
        start = tensors[index].start
        alive = [other for other in alive if tensors[other].end > start]
        for other in alive:
            found[index].append(other)
            found[other].append(index)
        alive.append(index)
    return [sorted(others) for others in found]


def _smallest_gap(taken: Sequence[tuple[int, int]], nbytes: int) -> int:
    """The offset of the smallest gap that holds the bytes (the lowest of equals); otherwise the
    top.  `taken`: sorted (start, end) of placed tensors, which are so few that plain loops are
    faster than numpy."""
    top, found, least = 0, -1, 0
    for low, high in taken:
        gap = low - top
        if gap >= nbytes and (found < 0 or gap < least):
            found, least = top, gap
        if high > top:  # noqa: PLR1730  max() takes twice as long
            top = high
    return top if found < 0 else found


@lru_cache(maxsize=4096)
def pack(tensors: tuple[Tensor, ...], max_nodes: int = MAX_NODES) -> Packing:
    """Offsets without overlap. The MILP runs only if best fit leaves a gap to the lower bound and
    the instance is small."""
    bound = live_peak(tensors)
    offsets = best_fit(tensors)
    solver: Literal["best_fit", "milp"] = "best_fit"
    pairs: list[tuple[int, int]] = []
    if _peak(tensors, offsets) > bound and max_nodes:  # the pairs are alive at the same time
        pairs = [(i, j) for i, others in enumerate(_beside(tensors)) for j in others if i < j]
    if 0 < len(pairs) <= MAX_PAIRS:
        better = _solve(tensors, pairs, bound, _peak(tensors, offsets), max_nodes)
        if better is not None and _peak(tensors, better) < _peak(tensors, offsets):
            offsets, solver = better, "milp"
    peak = _peak(tensors, offsets)
    return Packing(offsets=offsets, peak_bytes=peak, lower_bound_bytes=bound, solver=solver)


def _solve(
    tensors: Sequence[Tensor],
    pairs: Sequence[tuple[int, int]],
    bound: int,
    cap: int,
    max_nodes: int,
) -> tuple[int, ...] | None:
    """Offsets by the programme above, in units of `cap`; None if HiGHS reaches the node limit."""
    count, last = len(tensors), len(tensors) + len(pairs)
    sizes = [tensor.nbytes / cap for tensor in tensors]
    rows: list[Row] = [({i: 1.0, last: -1.0}, -size) for i, size in enumerate(sizes)]
    for z, (i, j) in enumerate(pairs, count):
        rows.append(({i: 1.0, j: -1.0, z: 1.0}, 1.0 - sizes[i]))  # z = 1: i lies below j
        rows.append(({j: 1.0, i: -1.0, z: -1.0}, -sizes[j]))
    found = minimum(
        costs=np.array([0.0] * last + [1.0]),
        integrality=np.array([0] * count + [1] * len(pairs) + [0]),
        rows=rows,
        lower=np.array([0.0] * last + [bound / cap]),
        upper=np.ones(last + 1),
        max_nodes=max_nodes,
        gap=1e-6,
    )
    if found is None:
        return None
    below = [(i, j) if found[z] > 0.5 else (j, i) for z, (i, j) in enumerate(pairs, count)]
    return _exact_offsets(tensors, below, found[:count])


def _exact_offsets(
    tensors: Sequence[Tensor], below: Sequence[tuple[int, int]], guess: NDArray[np.float64]
) -> tuple[int, ...]:
    """Integer offsets from the pairs (lower, upper); the solver's values are not exact integers."""
    under: dict[int, list[int]] = {}
    for low, high in below:
        under.setdefault(high, []).append(low)
    offsets = [0] * len(tensors)
    for index in sorted(range(len(tensors)), key=lambda i: (guess[i], i)):
        supports = under.get(index, [])
        offsets[index] = max((offsets[i] + tensors[i].nbytes for i in supports), default=0)
    return tuple(offsets)
