"""Peak device bytes as publications count them: allocated, reserved, or layers alone."""

from rematbench.cost.states import state_bytes
from rematbench.lowering.chunk_ops import ChunkOps
from rematbench.lowering.fates import resolve
from rematbench.lowering.lower import rank_orders
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.simulate.evaluate import PlanEvaluation


def reported_peak_bytes(problem: Problem, plan: Plan, evaluation: PlanEvaluation) -> int:
    """Peak device bytes as the publications of the problem's stack count them
    (`System.reported_peak`)."""
    if problem.system.reported_peak == "layers":
        layers = (layer for chunk in plan.partition[0] for layer in chunk)
        weights = sum(problem.layer(layer).parameters for layer in layers)
        states = state_bytes(weights, problem.layout, problem.system)
        return states.total + layer_bytes_in_flight(problem, plan)
    if problem.system.reported_peak == "reserved":
        return evaluation.reserved_bytes
    return max(evaluation.peak_device_bytes)


def layer_bytes_in_flight(problem: Problem, plan: Plan) -> int:
    """Peak bytes that the first stage's layers keep for micro-batches in flight."""
    order = rank_orders(plan, problem)[0]
    whole: dict[int, int] = {}
    for chunk, layers in enumerate(plan.partition[0]):
        ops = ChunkOps(problem, 0, chunk, layers)
        fates, _ = resolve(plan, ops.sites, "warmup", 0)
        whole[chunk] = sum(f.keep_bytes for (part, *_), f in fates.items() if part == "layer")
    live = peak = 0
    for item in order:
        live += whole[item.chunk] if item.forward else -whole[item.chunk]
        peak = max(peak, live)
    return peak
