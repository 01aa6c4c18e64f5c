"""Seconds of experts' exchanges that overlap another micro-batch.

Megatron-core's combined 1F1B (0.16.1, core/models/common/model_chunk_schedule_plan.py,
TransformerLayerSchedulePlan.run) pairs each layer of a backward with a layer of the forward that
follows it.  One stream computes, the other exchanges:

    exchange: combine backward | dispatch forward, dispatch backward        | combine forward
    compute:  attention forward| experts backward, weights, experts forward | attention backward

Compute waits for the remainder of an exchange.  Both layers are taken to be the same layer of the
model on one rank, and recomputation in the backward is left out.
"""

from collections.abc import Callable, Mapping
from math import fsum
from typing import NamedTuple

from rematbench.costs.operators.launches import BESIDE_ATTENTION
from rematbench.costs.operators.ops import Comm, Op, OpTable
from rematbench.problem import Problem

CommSeconds = Callable[[Comm, int], float]


class OpSeconds(NamedTuple):
    """Seconds of an operator's forward, input gradients and weight gradients, each with the
    collectives for which compute waits."""

    forward_s: float
    inputs_s: float
    weights_s: float


# Why: docs/decisions/engine.md, How is an exchange of experts beside another micro-batch
def op_seconds(problem: Problem, op: Op, rank: int, comm_s: CommSeconds) -> OpSeconds:
    """Seconds of an operator with its collectives before, after or during its kernels, as emit_op
    and emit_backward issue them. `comm_s`: seconds of a collective on a rank."""
    cost = problem.cost
    gemm = problem.tp_overlap == "gemm"
    split = op.has_weight and problem.tp_overlap in ("backward", "gemm")

    def after(kernel_s: float, *comms: tuple[Comm | None, bool]) -> float:
        beside_s = kernel_s
        for comm, beside in comms:
            if comm and (beside or comm.kind == "ring"):
                beside_s = max(beside_s, comm_s(comm, rank))
            elif comm:
                kernel_s += comm_s(comm, rank)
        return max(kernel_s, beside_s)

    fused = gemm and op.name != "attention"
    brought = (op.grad_amax, False), (op.grad_gather, gemm and op.has_weight), (op.regather, split)
    made = (op.amax, False), (op.gather, fused), (op.reduce, fused and op.has_weight)
    return OpSeconds(
        after(cost.op_s(op, "forward"), *made),
        after(cost.op_s(op, "backward_input"), *brought),
        after(cost.op_s(op, "backward_weight"), (op.grad_reduce, split)),
    )


class Exposed(NamedTuple):
    """The shares of an exchange's seconds that lengthen compute: in a forward that overlaps a
    backward, and in that backward."""

    forward: float
    backward: float


def exposed_shares(
    problem: Problem, table: OpTable, rank: int, comm_s: CommSeconds
) -> Mapping[str, Exposed]:
    """The exposed shares of a layer's exchanges, by operator.  The overlapped part of an exchange
    slows compute, as other collectives do (`CostModel.stall_s`)."""
    places = [place for place, op in enumerate(table.ops) if op.exchanges]
    if not places:
        return {}
    first, last = min(places), max(places)
    late = [op for op in table.ops[last:] if op.name in BESIDE_ATTENTION]
    beside = {first: table.ops[first + 1 : last], last: (*table.ops[:first], *late)}
    stall = problem.cost.overlap_factor("ep") - 1.0
    found = {}
    for place, ops in beside.items():
        op = table.ops[place]
        assert op.reduce is not None
        whole_s = comm_s(op.reduce, rank)
        parts = [op_seconds(problem, one, rank, comm_s) for one in ops]
        compute = OpSeconds._make(map(fsum, zip(*parts, strict=True)))
        left = _left(whole_s, compute, delayed=problem.system.experts.delayed_wgrad)
        shares = [(s + stall * (whole_s - s)) / whole_s if whole_s else 0.0 for s in left]
        found[op.name] = Exposed._make(shares)
    return found


def _left(whole_s: float, compute: OpSeconds, *, delayed: bool) -> tuple[float, float]:
    """(forward, backward): how many of an exchange's `whole_s` seconds compute waits. The forward's
    exchange starts together with the backward's `compute`. The backward's exchange follows it on
    the same stream and also waits for the input gradients. Unless weight gradients are `delayed`,
    they are computed together with the input gradients."""
    both_s = compute.inputs_s + compute.weights_s
    begins_s = max(compute.inputs_s if delayed else both_s, whole_s)
    ends_s = max(both_s, whole_s) + compute.forward_s
    return max(0.0, whole_s - both_s), max(0.0, begins_s + whole_s - ends_s)
