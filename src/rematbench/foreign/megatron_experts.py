"""Reads the options of a Megatron-LM launch line that describe a mixture of experts.

Source of names and defaults: Megatron-LM d98e8a64, megatron/training/arguments.py
(_add_moe_args) and megatron/core/transformer/transformer_config.py.
"""

import re
from typing import Any

from rematbench.foreign.reading import Options, Reading, first_value, number, whole
from rematbench.inputs.configfile import ConfigError

WIDTHS = {
    "num-experts": "count",
    "moe-router-topk": "active",
    "moe-intermediate-size": "ffn",  # MindSpeed has this name
    "moe-ffn-hidden-size": "ffn",
    "moe-shared-expert-intermediate-size": "shared_ffn",
    "moe-router-num-groups": "groups",
}
"""Options with a positive whole number, each with the field of Experts."""
DISPATCHERS = {"allgather": "allgather", "alltoall": "alltoall", "alltoall_seq": "alltoall"}
FLEXIBLE = ("deepep", "hybridep")
"""Backends of the dispatcher `flex`."""
BALANCED_BY_LOSS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
TYPE = "moe-token-dispatcher-type"
ROUTER = "moe-router-fusion"
FUSIONS = {ROUTER: "fused_router", "enable-experimental": "fused_indices"}
"""Switches, each with the stack's fact that it sets; the experimental kernels also need
PERMUTES."""
PERMUTES = "moe-permute-fusion"


def read_experts(reading: Reading, options: Options) -> None:
    """Set the experts' sizes if the line states them, and the capacity, the dispatcher and the
    overlap also if it only names its model.  ConfigError for a wrong value."""
    _capacity(reading, options)
    if options.get("num-experts"):
        _widths(reading, options)
        fused = FUSIONS if PERMUTES in options else {ROUTER: FUSIONS[ROUTER]}
        reading.facts |= {fact: True for option, fact in fused.items() if option in options}
    if options.get("num-experts") or {TYPE, "moe-enable-deepep"} & options.keys():
        _dispatcher(reading, options)
    if "moe-shared-expert-overlap" in options:
        reading.put("shared_overlap", 1, "--moe-shared-expert-overlap")
    if (overlap := "overlap-moe-expert-parallel-comm") in options:
        delayed = "delay-wgrad-compute" in options
        reading.put("ep_overlap", "delayed_wgrad" if delayed else "on", f"--{overlap}")


def _widths(reading: Reading, options: Options) -> None:
    experts: dict[str, Any] = {"active": 2, "ffn": reading.model.get("ffn", 0)}
    for option, name in WIDTHS.items():
        if options.get(option):
            experts[name] = whole(options[option][0], reading.file, f"--{option}")
    if dense := _dense_layers(reading, options):
        experts["dense_layers"] = dense
    experts |= _router(options, reading.file)
    if "moe-shared-expert-gate" in options:
        experts["shared_gate"] = True
    if "moe-grouped-gemm" not in options:
        text = "the experts of a rank run one after another, which takes longer than predicted"
        reading.notes.append(f"--moe-grouped-gemm is absent: {text}")
    reading.model["experts"] = experts


def _capacity(reading: Reading, options: Options) -> None:
    """Set the capacity of an expert; a factor below 0 means no limit."""
    option = "moe-expert-capacity-factor"
    text = first_value(options, option)
    factor = number(text or -1.0, reading.file, f"--{option}")
    if factor >= 0:
        reading.put("capacity_factor", factor, f"--{option}")
    if "moe-pad-expert-input-to-capacity" in options:
        reading.put("expert_padding", "capacity", "--moe-pad-expert-input-to-capacity")


def _router(options: Options, file: str) -> dict[str, Any]:
    """The fields of the router that differ from the defaults of Experts."""
    router: dict[str, Any] = {}
    if first_value(options, "moe-router-score-function", "softmax") != "softmax":
        router["router"] = first_value(options, "moe-router-score-function", "")
    kinds = options.get("moe-router-load-balancing-type") or ["aux_loss"]
    option = "moe-aux-loss-coeff"
    coefficient = number(first_value(options, option, "0"), file, f"--{option}")
    if coefficient and set(kinds) & set(BALANCED_BY_LOSS):
        router["aux_loss"] = coefficient
    return router


def _dense_layers(reading: Reading, options: Options) -> list[int]:
    """The layers without experts: `--moe-layer-freq N` has experts in layers 0, N, 2 N, ...; a
    list such as `([0]*3+[1]*58)` says 1 for each layer with experts.  ConfigError for any other
    text."""
    text = "".join(options.get("moe-layer-freq") or ["1"]).replace(" ", "")
    layers = reading.model.get("num_layers", 0)
    if text.isdigit() and int(text) > 0:
        return [layer for layer in range(layers) if layer % int(text)]
    terms = text.replace("(", "").replace(")", "").split("+")
    pattern: list[int] = []
    for term in terms:
        match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d+))?", term)
        if match is None:
            problem = f"{text!r} is neither a number nor a list of 0 and 1 such as ([0]*3+[1]*58)"
            raise ConfigError(reading.file, "--moe-layer-freq", problem)
        pattern += [int(one) for one in match[1].split(",")] * int(match[2] or 1)
    if layers and len(pattern) != layers:
        problem = f"{len(pattern)} entries for {layers} layers"
        raise ConfigError(reading.file, "--moe-layer-freq", problem)
    return [layer for layer, kind in enumerate(pattern) if not kind]


def _dispatcher(reading: Reading, options: Options) -> None:
    kind = first_value(options, TYPE, "allgather")
    backend = first_value(options, "moe-flex-dispatcher-backend", "deepep")
    taken = backend if kind == "flex" and backend in FLEXIBLE else DISPATCHERS.get(kind)
    if taken is None:
        allowed = ", ".join((*DISPATCHERS, *(f"flex with {name}" for name in FLEXIBLE)))
        reading.refused.append(f"--{TYPE}: {kind} (allowed: {allowed})")
    else:
        reading.facts["dispatcher"] = taken
