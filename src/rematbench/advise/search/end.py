"""What runs after the last pass of a step, as closed-form bounds count it."""

from rematbench.costs.operators.ops import Comm, CommKind
from rematbench.problem import Problem, state_fates


def after_passes(problem: Problem, count: int) -> list[Comm]:
    """The collectives of `count` parameters that run, unhidden, after the last pass."""
    lay, system = problem.layout, problem.system
    fates = {fate.kind: fate for fate in state_fates(lay, system)}
    if lay.state_shards == 1:
        return []
    found = []
    if not system.reduce_overlap and fates["gradient"].shards == 1:
        kind: CommKind = "reduce_scatter" if fates["optimizer"].shards > 1 else "all_reduce"
        found.append(Comm(kind, "dp", system.reduce_bytes * count))
    if not system.gather_overlap and fates["parameter"].gather == "step":
        found.append(Comm("all_gather", "dp", system.gather_bytes * count))
    return found


def host_update_s(problem: Problem, count: int) -> float:
    """Seconds of a rank's share of the optimizer update on the host; 0 for states on the device."""
    fate = problem.base_plan.state("optimizer")
    return problem.cost.host_update_s(count // fate.shards) if fate.home == "host" else 0.0
