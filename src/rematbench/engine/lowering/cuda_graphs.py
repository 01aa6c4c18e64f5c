"""CUDA graphs of each layer's forward and backward: the memory they hold, the plans they refuse."""

from rematbench.engine.lowering.chunk_ops import Unit
from rematbench.plan import ByteBudget, Fate, Group, Offload, Plan, Recompute, Split
from rematbench.problem import Problem


def captured(problem: Problem, unit: Unit) -> bool:
    """Whether a unit's passes are CUDA graphs: true for layers, where the stack captures graphs."""
    return problem.system.cuda_graphs and unit.table.part == "layer"


def graph_name(unit: Unit) -> str:
    """The storage name of what a layer's CUDA graph holds beside the layer's activations."""
    return f"{unit.prefix}.graph"


def uncaptured(plan: Plan, problem: Problem) -> str:
    """The feature of a plan that CUDA graphs of layers do not support, in words; empty if none.

    Megatron-core 0.16.1, transformer_config.py: CUDA graphs are not supported with CPU offloading,
    and full recomputation needs the graph of a whole iteration.  Parameters gathered per layer are
    refused too, because a graph's addresses are fixed.
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
