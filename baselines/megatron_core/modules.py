"""The modules that Megatron-core recomputes or offloads, with their tensors."""

from typing import Literal

from rematbench.solve.recompute_modules import Module

RecomputeModule = Module
OffloadModule = Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]

MIN_OFFLOADED = 2
"""The fewest elements that an offloaded tensor has. Single numbers are not offloaded: on CUDA, fp32
attention saves its random seeds, which are in host memory already."""
TRACED: dict[str, tuple[str, ...]] = {
    "core_attn": ("causal_mask",),
    "layernorm": ("attn_norm_statistics", "mlp_norm_statistics"),
    "mlp": ("up_out_offset",),
    "mla_up_proj": ("rope_tables",),
}
"""The tensors that a recomputed module drops and that only the stack without TransformerEngine
saves (stack.py)."""
MOVED: dict[str, tuple[str, ...]] = {
    "attn_norm": ("layer_input", "attn_norm_statistics"),
    "qkv_linear": ("attn_norm_out",),
    "core_attn": (
        "q",
        "k",
        "v",
        "kv_repeated",  # only the stack without TransformerEngine saves it (stack.py)
        "lse",
        "attn_probs",
        "attn_probs_mask",
        "attn_probs_dropped",
        "causal_mask",
    ),
    "attn_proj": ("attn_out",),
    "mlp_norm": ("attn_residual", "mlp_norm_statistics"),
}
