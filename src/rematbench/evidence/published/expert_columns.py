"""The columns of a published row that only steps of models with experts have
(results/published/moe.csv): the experts, their layout, and facts of the stack.  A word that is not
modelled raises a one-line RowError that names its column."""

import re
from typing import Any, NoReturn, get_args

from msgspec.structs import replace

from rematbench.evidence.published.sheets import Row, RowError, read_choice, text, whole
from rematbench.inputs.system import Dispatcher, System, with_facts
from rematbench.solve.recompute_modules import MODULES
from rematbench.workload import Experts, Model, Precision

NONE = ("", "none", "no", "0")
REFUSED = {
    "mtp_layers": "multi-token prediction is not modelled",
    "cuda_graph": "CUDA graphs of parts of a layer, or of a whole step, are not modelled",
    "offload": "is not modelled",
    "pp_layout": "stages of a layout string are not modelled",
}
"""Columns whose features are not modelled, each with the reason."""
ROUTERS = re.compile(r"^$|dropless|capacity factor ([\d.]+), padded")
"""Routers under which an expert receives as many tokens as another, forced to or by assumption: a
capacity factor pads each expert to so many of its shares, and drops what is beyond."""
FLAGS = re.compile(r"flags \{([^}]*)\}")
OVERLAPS: dict[str, dict[str, Any]] = {
    "": {},
    "no": {},
    "none": {},
    "yes": {"ep_overlap": "interleaved"},
}
"""Words for exchanges beside another micro-batch, each with the facts that it states."""
DELAYED = "wgrad delayed"
"""A note's words for weight gradients behind the input gradients, with such an overlap."""
DROPOUTS = {"hidden-dropout": "dropout", "attention-dropout": "attention_dropout"}
KINDS = re.compile(r"^(mha|gqa)(?:: (.*))?$")
BF16_MOMENTS = 4 + 2 + 2
OPTIMIZERS: dict[str, dict[str, int]] = {
    "": {},
    "adam": {},
    "adam, not sharded": {},
    "adam fp32 states, fp32 gradients": {"grad_bytes": 4, "reduce_bytes": 4},
    "mcore distributed adam, bf16 gradient reduce": {"grad_bytes": 2, "reduce_bytes": 2},
    "adam, precision-aware (bf16 moments)": {"optimizer_bytes": BF16_MOMENTS},
    "adam, precision-aware (bf16 moments, fp32 master)": {"optimizer_bytes": BF16_MOMENTS},
    "adam, precision-aware (bf16 moments, fp32 master and gradients)": {
        "optimizer_bytes": BF16_MOMENTS,
        "grad_bytes": 4,
        "reduce_bytes": 4,
    },
}
"""Published words for the optimizer, each with the facts of the stack that it states (bytes of a
parameter: an fp32 master copy and two moments)."""


def has_experts(row: Row) -> bool:
    """Whether a row's model has experts."""
    return text(row, "experts") not in NONE


def refuse_unmodelled(row: Row) -> None:
    """RowError for a feature of a row with experts that is not modelled, or not published."""
    read_choice(row, "precision", "bf16", Precision)
    attention_facts(row)
    for column, reason in REFUSED.items():
        if text(row, column).lower() not in NONE:
            _refuse(row, column, reason)
    if not ROUTERS.search(text(row, "router")):
        _refuse(row, "router", "is not modelled (dropless, or capacity factor F, padded)")
    if text(row, "ep_overlap").lower() not in OVERLAPS:
        _refuse(row, "ep_overlap", f"is not modelled (known: {', '.join(filter(None, OVERLAPS))})")
    if text(row, "optimizer") not in OPTIMIZERS:
        _refuse(row, "optimizer", "is not modelled")
    if not text(row, "recompute") and not text(row, "recompute_modules"):
        raise RowError("unsupported", "recomputation not published")


def _refuse(row: Row, column: str, reason: str) -> NoReturn:
    raise RowError("unsupported", f"column {column}: {text(row, column)!r}: {reason}")


def read_experts(row: Row, model: Model) -> Model:
    """The model with the experts of a row, and the heads of the column `attention_kind`.  The first
    layers are the dense ones."""
    dense = 0 if text(row, "dense_layers") in NONE else whole(row, "dense_layers")
    shared = 0 if text(row, "shared_experts_ffn") in NONE else whole(row, "shared_experts_ffn")
    widths: dict[str, Any] = {
        "count": whole(row, "experts"),
        "active": whole(row, "topk"),
        "ffn": whole(row, "moe_ffn"),
        "shared_ffn": shared,
        "dense_layers": tuple(range(dense)),
    }
    experts = replace(model.experts, **widths) if model.experts else Experts(**widths)
    return replace(flagged_model(row, model), experts=experts, **attention_facts(row))


def attention_facts(row: Row) -> dict[str, Any]:
    """The fields of Model in the column `attention_kind` (`gqa: head_dim 128, qk-norm`)."""
    kind = text(row, "attention_kind").lower()
    found = KINDS.match(kind)
    if kind and not found:
        _refuse(row, "attention_kind", "is not modelled (known: mha, gqa)")
    words = (found[2] or "").split(", ") if found else []
    facts: dict[str, Any] = {"qk_norm": True} if "qk-norm" in words else {}
    widths = [int(word.split()[1]) for word in words if word.startswith("head_dim ")]
    return facts | ({"head_dim": widths[0]} if widths else {})


def dispatching(row: Row, system: System) -> System:
    """The stack with the dispatcher, the overlap and the optimizer of a row."""
    word = text(row, "dispatcher") or system.experts.dispatcher
    if word not in get_args(Dispatcher):
        known = ", ".join(get_args(Dispatcher))
        raise RowError("unsupported", f"dispatcher {word!r} is not modelled (known: {known})")
    found = flagged_system(row, system)
    overlap = OVERLAPS[text(row, "ep_overlap").lower()]
    delayed = {"delayed_wgrad": True} if overlap and DELAYED in text(row, "note") else {}
    return with_facts(
        found, dispatcher=word, **overlap, **delayed, **OPTIMIZERS[text(row, "optimizer")]
    )


def expert_layout(row: Row, dp: int) -> dict[str, int]:
    """The degrees `ep` and `etp` of a row, and its sharding degree by flag; without `etp` experts
    are split as attention is."""
    found = {"ep": whole(row, "ep", 1)}
    instances = int(flags(row).get("num-distributed-optimizer-instances", "1"))
    found |= {"shard_degree": dp // instances} if instances > 1 else {}
    return found | ({"etp": whole(row, "etp")} if text(row, "etp") else {})


# -- flags of Megatron-LM in a note ----------------------------------------------------------------


def flags(row: Row) -> dict[str, str]:
    """The launch flags that a row's note lists (`flags {--swiglu:true,--hidden-dropout:0.0}`),
    without dashes; empty where it lists none."""
    found = FLAGS.search(text(row, "note"))
    words = found[1].split(",") if found else []
    pairs = (word.strip().removeprefix("--").partition(":") for word in words)
    return {name: value for name, _, value in pairs}


def flagged_model(row: Row, model: Model) -> Model:
    """The model with the dropouts, biases and ends of the row's flags."""
    said = flags(row)
    facts: dict[str, Any] = {}
    for flag, field in DROPOUTS.items():
        if flag in said:
            facts[field] = float(said[flag])
    if "disable-bias-linear" in said:
        facts |= dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), False)
    if "untie-embeddings-and-output-weights" in said:
        facts["tied_embeddings"] = False
    return replace(model, **facts)


def flagged_system(row: Row, system: System) -> System:
    """The stack without the workspaces of a grouped GEMM, where the row's flags do not name it."""
    said = flags(row)
    if not said or "moe-grouped-gemm" in said:
        return system
    return with_facts(system, expert_workspaces=0)


def module_settings(row: Row) -> dict[str, Any] | None:
    """The settings of selective_recompute for the modules of a row; None where the row names none
    or another policy."""
    modules = text(row, "recompute_modules").split()
    if not modules or set(modules) & {"none", "full"}:
        return None
    unknown = [module for module in modules if module not in MODULES]
    if unknown:
        known = ", ".join(MODULES)
        reason = f"column recompute_modules: {unknown[0]!r} is not modelled (known: {known})"
        raise RowError("unsupported", reason)
    return {"modules": tuple(modules)}


def capacity(row: Row) -> dict[str, Any]:
    """The capacity of a row's experts; empty for a router that drops no token."""
    found = ROUTERS.search(text(row, "router"))
    if not found or not found[1]:
        return {}
    return {"capacity_factor": float(found[1]), "expert_padding": "capacity"}


def balance_remark(row: Row) -> str:
    """What a prediction assumes about the router of a row that was not forced to balance."""
    return "" if "forced" in text(row, "router") else "experts balanced"
