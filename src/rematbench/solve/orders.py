"""Orders of passes that methods choose."""

from rematbench.engine.lowering.schedule import grouped
from rematbench.plan import Pass
from rematbench.problem import Problem


def grouped_orders(problem: Problem, group: int) -> tuple[tuple[Pass, ...], ...]:
    """Every rank's passes under generalised interleaving in groups of micro-batches."""
    lay = problem.layout
    of_layout = lay.pp, lay.vpp, group, lay.num_micro_batches
    return tuple(grouped(rank, *of_layout) for rank in range(lay.pp))


def smallest_group(problem: Problem) -> int | None:
    """The smallest group for generalised interleaving: at least half of pp, and a divisor of the
    number of micro-batches; None if no group up to pp is possible."""
    lay = problem.layout
    sizes = range(-(-lay.pp // 2), lay.pp + 1)
    return next((size for size in sizes if lay.num_micro_batches % size == 0), None)
