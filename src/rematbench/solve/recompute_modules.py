"""The modules that Megatron-core can recompute, as the saved tensors inside them."""

from collections.abc import Iterable
from typing import Literal

from rematbench.plan import Recompute, Rule, Scope, Select
from rematbench.problem import Problem

Module = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]
CORE_ATTENTION = ("attn_probs", "attn_probs_mask", "attn_probs_dropped")
MLP = ("gate_out", "up_out", "act_out", "fc2_in")
SHARED = ("shared_gate_out", "shared_up_out", "shared_fc2_in")
WEIGHTED = ("expert_act_out", "expert_fc2_in")
EXPERTS = ("expert_in", "expert_fc1_out", "expert_probs", *WEIGHTED)
MODULES: dict[Module, tuple[str, ...]] = {
    "core_attn": (*CORE_ATTENTION, "lse"),
    "layernorm": ("attn_norm_out", "mlp_norm_out"),
    "mlp": MLP,
    "moe": ("router_scores", "permutation", *EXPERTS, *SHARED, "shared_out"),
    "moe_act": WEIGHTED,
    "shared_experts": SHARED,
}
"""The saved tensors inside the modules that Megatron-core recomputes (transformer_config.py,
recompute_modules)."""


def modules_dropped(modules: Iterable[Module]) -> tuple[str, ...]:
    """The saved tensors that recompute modules drop, in the order of the modules."""
    return tuple(dict.fromkeys(name for module in modules for name in MODULES[module]))


def before_experts(problem: Problem) -> tuple[int, ...]:
    """The layers where the module `layernorm` drops `mlp_norm_out` and nothing else, on a stack
    with TransformerEngine's norms: they are part of the linear after them, except the norm before
    experts (megatron-core 0.16.1, core/models/gpt/gpt_layer_specs.py, pre_mlp_layernorm).  Empty
    for a stack whose norms are all modules, and for a model without experts."""
    model = problem.workload.model
    if problem.system.kernels.norm != "fused" or model.experts is None:
        return ()
    return tuple(layer for layer in range(model.num_layers) if not model.is_dense(layer))


def rebuilding(names: Iterable[str], scope: Scope, routed: tuple[int, ...]) -> list[Rule]:
    """Rules that rebuild these tensors of every layer, but of the layers `routed` alone the output
    of the norm before experts (empty: of every layer too)."""
    norm = ["mlp_norm_out"] if routed else []
    parts = (
        ([name for name in names if name not in norm], None),
        ([name for name in names if name in norm], routed),
    )
    return [
        Rule(
            Select(parts=("layer",), layers=layers, activations=tuple(some), kept=True),
            Recompute(scope=scope),
        )
        for some, layers in parts
        if some
    ]
