"""A CUDA graph of each layer's forward and backward: what it holds, and which plans it refuses."""

from rematbench.lowering.chunk_ops import Unit
from rematbench.plan import ByteBudget, Fate, Group, Offload, Plan, Recompute, Split
from rematbench.problem import Problem


def captured(problem: Problem, unit: Unit) -> bool:
    """Whether a unit's passes are graphs: a layer's are, where the stack captures them."""
    return problem.system.cuda_graphs and unit.table.part == "layer"


def graph_name(unit: Unit) -> str:
    """The storage of what a layer's graph holds beside the activations that the layer keeps."""
    return f"{unit.prefix}.graph"


def uncaptured(plan: Plan, problem: Problem) -> str:
    """What of a plan no graph of a layer's pass contains; empty where graphs contain it all.

    Megatron-core 0.16.1, transformer_config.py: CUDA graphs are not supported with CPU offloading,
    and full recomputation needs the graph of a whole iteration.  A graph's addresses are fixed, so
    that parameters that are gathered for each layer are refused, too.
    """
    if not problem.system.cuda_graphs:
        return ""
    fates = [rule.fate for rule in plan.rules]
    gathered = problem.layout.state_shards > 1 and plan.state("parameter").gather == "layer"
    reasons = {
        "activations on the host": any(_moves(fate) for fate in fates),
        "whole layers recomputed": any(_whole(fate) for fate in fates),
        "recomputation in another operator's window": any(
            isinstance(fate, Recompute) and fate.window is not None for fate in fates
        ),
        "parameters gathered per layer": gathered,
        "an optimizer in the backward": plan.state("optimizer").update == "backward",
    }
    found = [name for name, holds in reasons.items() if holds]
    return f"CUDA graphs of layers ({problem.system.name}) with {found[0]}" if found else ""


def _moves(fate: Fate) -> bool:
    match fate:
        case Offload():
            return True
        case Split():
            return fate.offload > 0
        case ByteBudget():
            return fate.alpha > 0
    return False


def _whole(fate: Fate) -> bool:
    if isinstance(fate, Recompute | Split) and isinstance(fate.scope, Group):
        return True
    return isinstance(fate, Recompute) and fate.whole and fate.scope == "layer"
