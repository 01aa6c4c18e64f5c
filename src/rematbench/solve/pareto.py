"""The Pareto front of recomputation seconds against kept bytes, over subsets of tensors."""

from itertools import combinations

from msgspec import Struct

from rematbench.costs.operators.ops import OpTable
from rematbench.problem import Problem


class Point(Struct, frozen=True, kw_only=True, order=True):
    """One choice of dropped activations for a layer.  `kept_bytes`: of one micro-batch on one rank;
    `recompute_s`: seconds of the kernels and collectives that rebuild the dropped activations."""

    kept_bytes: int
    recompute_s: float
    dropped: tuple[str, ...]


def candidates(table: OpTable) -> tuple[str, ...]:
    """The saved activations that operators of the layer can rebuild."""
    return tuple(name for name in table.saved if table.producer(name) is not None)


def point(problem: Problem, table: OpTable, dropped: tuple[str, ...]) -> Point:
    again = problem.cost.recompute_s(table, frozenset(dropped)) if dropped else 0.0
    kept = sum(table.activations[n].nbytes for n in table.saved if n not in dropped)
    return Point(kept_bytes=kept, recompute_s=again, dropped=dropped)


def front(problem: Problem, table: OpTable) -> tuple[Point, ...]:
    """The points that no other subset beats in both bytes and seconds, from keep-all downwards."""
    best: list[Point] = []
    names = candidates(table)
    choices = (
        point(problem, table, dropped)
        for size in range(len(names) + 1)
        for dropped in combinations(names, size)
    )
    for choice in sorted(choices, key=lambda p: (p.recompute_s, p.kept_bytes, p.dropped)):
        if not best or choice.kept_bytes < best[-1].kept_bytes:
            best.append(choice)
    return tuple(best)


def cheapest_within(front: tuple[Point, ...], kept_bytes: float) -> Point:
    """The fastest point of a front that keeps at most `kept_bytes`; if there is none, the point
    with the fewest kept bytes."""
    fitting = [p for p in front if p.kept_bytes <= kept_bytes]
    return min(fitting, key=lambda p: (p.recompute_s, p.kept_bytes)) if fitting else front[-1]
