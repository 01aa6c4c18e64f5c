"""The choices of recomputation: Megatron-core's modules, each with the saved tensors inside it, and
lists of layers."""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import Literal

from rematbench.costs.operators.ops import QUANTISED
from rematbench.inputs.recipes import recipe_of
from rematbench.plan import Group, Plan, Recompute, Rule, Scope
from rematbench.problem import Problem
from rematbench.solve.kept import rule_of

Module = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"]
CORE_ATTENTION = ("attn_probs", "attn_probs_mask", "attn_probs_dropped")
MLP = ("gate_out", "up_out", "act_out", "fc2_in")
SHARED = ("shared_gate_out", "shared_up_out", "shared_fc2_in")
WEIGHTED = ("expert_act_out", "expert_clamped", "expert_fc2_in")
EXPERTS = ("expert_in", "expert_fc1_out", "expert_probs", *WEIGHTED)
MODULES: dict[Module, tuple[str, ...]] = {
    "core_attn": (*CORE_ATTENTION, "lse"),
    "layernorm": ("attn_norm_out", "mlp_norm_out"),
    "mlp": MLP,
    "moe": ("router_scores", "permutation", *EXPERTS, *SHARED, "shared_out"),
    "moe_act": WEIGHTED,
    "shared_experts": SHARED,
    "mla_up_proj": ("q", "k", "v"),
}
"""The saved tensors inside the modules that Megatron-core recomputes (transformer_config.py,
recompute_modules)."""


def with_copies(names: Iterable[str]) -> tuple[str, ...]:
    """Names of tensors, each with the name of the quantised copy that a linear may save."""
    return tuple(name for one in names for name in (one, f"{one}{QUANTISED}"))


def modules_dropped(modules: Iterable[Module]) -> tuple[str, ...]:
    """The saved tensors that recomputing these modules drops, in the order of the modules."""
    return tuple(dict.fromkeys(name for module in modules for name in MODULES[module]))


def needs_original(modules: Iterable[Module], problem: Problem) -> str:
    """Megatron-core's reason why the job's recipe excludes a module from recomputation; empty if it
    does not.  Linears would have to save such a module's outputs in 16 bits and quantise them
    again."""
    recipe = recipe_of(problem.workload)
    if recipe is None or recipe.keeps_original or {"moe_act", "layernorm"}.isdisjoint(modules):
        return ""
    return "Delayed scaling does not support moe_act and layernorm recompute for fp8."


def before_experts(problem: Problem) -> tuple[int, ...]:
    """The layers with experts, on a stack with TransformerEngine's norms.  There the module
    `layernorm` drops only `mlp_norm_out`, because all other norms are part of the linear after them
    (megatron-core 0.16.1, core/models/gpt/gpt_layer_specs.py, pre_mlp_layernorm).  Empty for a
    stack whose norms are all modules, and for a model without experts."""
    model = problem.workload.model
    if problem.system.kernels.norm != "fused" or model.experts is None:
        return ()
    return tuple(layer for layer in range(model.num_layers) if not model.is_dense(layer))


def rebuilding(
    names: Iterable[str],
    scope: Scope,
    routed: tuple[int, ...] = (),
    layers: tuple[int, ...] | None = None,
) -> list[Rule]:
    """Rules that rebuild these tensors in `layers` (None: in every layer).  The output of the norm
    before the MLP is rebuilt only in the layers `routed` (empty: as all other tensors)."""
    norm = list(with_copies(["mlp_norm_out"])) if routed else []
    at_norm = tuple(layer for layer in routed if layers is None or layer in layers)
    parts = (
        ([name for name in names if name not in norm], layers),
        ([name for name in names if name in norm], at_norm),
    )
    fate = Recompute(scope=scope)
    return [rule_of(tuple(some), fate, where) for some, where in parts if some and where != ()]


def chunks_of(plan: Plan) -> list[tuple[int, ...]]:
    return [layers for rank in plan.partition for layers in rank]


def rebuilding_layers(names: tuple[str, ...], layers: tuple[int, ...] | None) -> Rule:
    """The rule that rebuilds these tensors of a layer together, in `layers` (None: in all)."""
    return rule_of(names, Recompute(scope="layer", whole=True), layers)


def rebuilding_groups(names: tuple[str, ...], plan: Plan, size: int) -> list[Rule]:
    """Rules that rebuild the layers of every chunk in groups of `size`, each group at once: these
    tensors of all its layers, and the inputs of all layers but its first."""
    if size == 1:
        return [rebuilding_layers(names, None)]
    rules: list[Rule] = []
    for chunk in chunks_of(plan):
        for group in (chunk[i : i + size] for i in range(0, len(chunk), size)):
            if len(group) == 1:
                rules.append(rebuilding_layers(names, group))
                continue
            fate = Recompute(scope=Group(group[0], group[-1]), whole=True)
            rules += [rule_of(names, fate, group), rule_of(("layer_input",), fate, group[1:])]
    return rules


def chosen_layers(base: Plan, layers: str) -> tuple[int, ...] | str:
    """The layers that a text lists (`0-5,20`: global indices; prediction layers come last), or a
    sentence that says why the text is wrong."""
    last = max(layer for chunk in chunks_of(base) for layer in chunk)
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", layers):
        return f"{layers!r} is not a list of layers such as 0-5,20"
    found: set[int] = set()
    for word in layers.split(","):
        first, _, end = word.partition("-")
        found |= set(range(int(first), min(int(end or first), last + 1) + 1))
    if not found or max(found) > last:
        return f"layers {layers}: the model has layers 0-{last}"
    return tuple(sorted(found))


def layers_text(layers: Iterable[int]) -> str:
    """Layers as the text that `chosen_layers` reads: runs such as `0-5`, separated by commas."""
    runs = [
        [layer for _, layer in run]
        for _, run in groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
