"""Seconds of whole layers, and the number of layers that a rank has in flight."""

from collections.abc import Collection
from math import fsum

from rematbench.costs.operators.ops import OpTable
from rematbench.engine.lowering.lower import rank_orders
from rematbench.plan import Plan
from rematbench.problem import Problem


def forward_s(problem: Problem, table: OpTable) -> float:
    """Seconds of a part's forward when nothing overlaps: kernels and collectives."""
    cost = problem.cost
    return fsum(
        cost.op_s(op, "forward")
        + fsum(cost.comm_s(c, 0) for c in (op.gather, op.reduce) if c is not None)
        for op in table.ops
    )


def backward_s(problem: Problem, table: OpTable) -> float:
    """Seconds of a part's backward when nothing overlaps: kernels and collectives."""
    cost = problem.cost
    return fsum(
        cost.op_s(op, "backward_input")
        + cost.op_s(op, "backward_weight")
        + fsum(
            cost.comm_s(c, 0)
            for c in (op.grad_gather, op.regather, op.grad_reduce)
            if c is not None
        )
        for op in table.ops
    )


def layers_in_flight(problem: Problem, plan: Plan, rank: int, chosen: Collection[int]) -> int:
    """The maximum number of (chosen layer, micro-batch) pairs of a rank between forward and
    backward."""
    sizes = [len(set(layers) & set(chosen)) for layers in plan.partition[rank]]
    live = peak = 0
    for step in rank_orders(plan, problem)[rank]:
        live += (step.forward - step.last) * sizes[step.chunk]
        peak = max(peak, live)
    return peak
