"""The names of activations over all models and stacks: the names that a rule may select.

Each model has some of these names. So a rule may name an activation that a given problem lacks, but
no name outside this set.
"""

_HEADS = ("q", "k", "v")
_NORMS = ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm", "final_norm")
_BLOCK = (
    "layer_input",
    "lse",
    "attn_heads",
    "attn_out",
    "proj_out",
    "attn_residual",
    "gate_out",
    "up_out",
    "act_out",
    "fc2_in",
    "fc2_out",
    "layer_output",
)
_SCORES = ("probs", "softmax", "capped", "probs_mask", "probs_dropped")
_ENDS = ("logits", "logits_capped", "logits_held", "loss_saved")

ACTIVATIONS = frozenset(
    {
        *_BLOCK,
        *_ENDS,
        *_HEADS,
        *(f"{name}_rows" for name in _HEADS),
        *(f"{name}{order}_raw" for name in "qk" for order in ("", "_rows")),
        *(f"{name}_repeated" for name in "kv"),
        *(f"{norm}_out" for norm in _NORMS),
        *(f"{n}_{s}" for n in (*_NORMS, "q_norm", "k_norm") for s in ("wide", "root", "scaled")),
        *(f"attn_{name}" for name in _SCORES),
        *(f"{name}_mask" for name in ("embedding", "attn_residual", "layer_output")),
    }
)
