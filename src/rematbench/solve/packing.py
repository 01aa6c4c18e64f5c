"""Offline storage allocation by best fit: fixed offsets for tensors with fixed lifetimes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

ROUNDS = 12


class Tensor(NamedTuple):
    """A tensor's bytes, alive from `start` until before `end` (any integer clock)."""

    nbytes: int
    start: int
    end: int


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
            peak = packed_bytes(tensors, offsets)
            if lowest < 0 or peak < lowest:
                best, lowest = offsets, peak
            if lowest <= bound:
                return best
            tops = {i for i, t in enumerate(tensors) if offsets[i] + t.nbytes == peak}
            order = [*sorted(tops), *(i for i in order if i not in tops)]
    return best


def _area(tensor: Tensor) -> int:
    return tensor.nbytes * (tensor.end - tensor.start)


def packed_bytes(tensors: Sequence[Tensor], offsets: Sequence[int]) -> int:
    """The bytes of one allocation that holds all tensors at their offsets."""
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
    """For each tensor, the indices of the tensors that are alive at the same time."""
    found: list[list[int]] = [[] for _ in tensors]
    alive: list[int] = []
    for index in sorted(range(len(tensors)), key=lambda i: tensors[i].start):
        start = tensors[index].start
        alive = [other for other in alive if tensors[other].end > start]
        for other in alive:
            found[index].append(other)
            found[other].append(index)
        alive.append(index)
    return found


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
