"""The modules that Megatron-core can recompute, as the saved tensors inside them."""

from collections.abc import Iterable
from typing import Literal

Module = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]
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
}
"""The saved tensors inside the modules that Megatron-core recomputes (transformer_config.py,
recompute_modules)."""


def modules_dropped(modules: Iterable[Module]) -> tuple[str, ...]:
    """The saved tensors that recompute modules drop, in the order of the modules."""
    return tuple(dict.fromkeys(name for module in modules for name in MODULES[module]))
