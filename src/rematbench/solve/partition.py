"""Layers over pipeline stages: layers move one at a time while the slowest stage gets faster."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from rematbench.plan import Plan

StageSeconds = Callable[[int, int], float]
"""(rank, layers) -> seconds of one micro-batch on that stage; infinite where it does not fit."""


def balance(counts: Sequence[int], stage_s: StageSeconds) -> tuple[int, ...]:
    """The layer counts after moving layers off the slowest stage, one at a time. Each move leaves
    the slowest stage (the last of equals) for the stage where the sorted stage times become least;
    moves end when no move helps."""
    best = tuple(counts)
    times = [stage_s(rank, n) for rank, n in enumerate(best)]
    for _ in range(sum(counts)):
        slowest = max(range(len(best)), key=lambda r: (times[r], r))
        moves = [
            _moved(best, slowest, target)
            for target in range(len(best))
            if target != slowest and best[slowest] > 1
        ]
        scored = [
            (sorted((stage_s(r, n) for r, n in enumerate(m)), reverse=True), m) for m in moves
        ]
        if not scored or min(scored)[0] >= sorted(times, reverse=True):
            break
        best = min(scored)[1]
        times = [stage_s(rank, n) for rank, n in enumerate(best)]
    return best


def _moved(counts: tuple[int, ...], source: int, target: int) -> tuple[int, ...]:
    return tuple(n - (r == source) + (r == target) for r, n in enumerate(counts))


def contiguous(counts: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The partition with `counts` consecutive layers on the ranks, one chunk a rank."""
    bounds = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
    return tuple((tuple(range(first, last)),) for first, last in pairwise(bounds))


def counts_of(plan: Plan) -> tuple[int, ...]:
    """The number of layers of each rank."""
    return tuple(sum(len(chunk) for chunk in chunks) for chunks in plan.partition)
