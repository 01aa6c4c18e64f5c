"""Orders of passes that methods choose."""

from rematbench.engine.lowering.schedule import grouped
from rematbench.plan import Pass
from rematbench.problem import Problem


def grouped_orders(problem: Problem, group: int) -> tuple[tuple[Pass, ...], ...]:
    """Generalised interleaving in groups of so many micro-batches, of every rank."""
    lay = problem.layout
    of_layout = lay.pp, lay.vpp, group, lay.num_micro_batches
    return tuple(grouped(rank, *of_layout) for rank in range(lay.pp))


def smallest_group(problem: Problem) -> int | None:
    """The fewest micro-batches of a group that generalised interleaving runs: at least half of pp,
    and a divisor of all; None if there is none up to pp."""
    lay = problem.layout
    sizes = range(-(-lay.pp // 2), lay.pp + 1)
    return next((size for size in sizes if lay.num_micro_batches % size == 0), None)
