"""Seconds of whole layers, and the number of layers that a rank has in flight."""

from collections.abc import Collection, Sequence
from math import fsum

from rematbench.costs.bind_kernels import Direction
from rematbench.costs.operators.ops import OpTable
from rematbench.engine.lowering.lower import rank_orders
from rematbench.plan import Plan
from rematbench.problem import Problem


def _part_s(
    problem: Problem, table: OpTable, ways: Sequence[Direction], comms: Sequence[str]
) -> float:
    cost = problem.cost
    return fsum(
        fsum(cost.op_s(op, way) for way in ways)
        + fsum(cost.comm_s(c, 0) for name in comms if (c := getattr(op, name)) is not None)
        for op in table.ops
    )


def forward_s(problem: Problem, table: OpTable) -> float:
    """Seconds of a part's forward when nothing overlaps: kernels and collectives."""
    return _part_s(problem, table, ("forward",), ("amax", "gather", "reduce"))


def backward_s(problem: Problem, table: OpTable) -> float:
    """Seconds of a part's backward when nothing overlaps: kernels and collectives."""
    comms = ("grad_amax", "grad_gather", "regather", "grad_reduce")
    return _part_s(problem, table, ("backward_input", "backward_weight"), comms)


def layers_in_flight(problem: Problem, plan: Plan, rank: int, chosen: Collection[int]) -> int:
    """The maximum number of (chosen layer, micro-batch) pairs of a rank between forward and
    backward."""
    sizes = [len(set(layers) & set(chosen)) for layers in plan.partition[rank]]
    live = peak = 0
    for step in rank_orders(plan, problem)[rank]:
        live += (step.forward - step.last) * sizes[step.chunk]
        peak = max(peak, live)
    return peak
