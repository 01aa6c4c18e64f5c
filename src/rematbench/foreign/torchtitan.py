"""Reads a torchtitan configuration (TOML)."""

import re
from collections.abc import Mapping
from typing import Any

from rematbench.foreign.keys import is_off, read_keys
from rematbench.foreign.reading import Reading
from rematbench.foreign.recipes import read_converters

SECTIONS = ("parallelism", "experimental", "training")
"""Sections that held parallel degrees in different versions."""
WHOLE_LOGITS = "logits of all tokens on each rank of tensor parallelism are not modelled"
SIZE = re.compile(r"(\d+(?:\.\d+)?[bm])$", re.IGNORECASE)


def read_torchtitan(data: Mapping[str, Any], file: str) -> Reading:
    """Read a torchtitan configuration into a Reading.  ConfigError for a wrong value."""
    reading = Reading(file=file, package="torchtitan", system="torchtitan")
    reading.put("precision", "bf16", "mixed_precision_param")
    read_keys(reading, data, "torchtitan")
    for section in SECTIONS:
        _section(reading, data.get(section) or {}, f"{section}.")
    _model(reading, data.get("model") or {})
    _checkpoint(reading, data.get("activation_checkpoint") or {})
    reading.system = _compiled(reading, data) or reading.system
    read_converters(reading, data)
    _experts(reading)
    _batch(reading)
    return reading


def _section(reading: Reading, section: Mapping[str, Any], prefix: str) -> None:
    key = f"{prefix}fsdp_reshard_after_forward"
    reshard = str(section.get("fsdp_reshard_after_forward", "default"))
    if reshard == "never":
        reading.put("zero_stage", 2, key)
    elif reshard == "always" and reading.get("pp", 1) > 1:
        reading.refused.append(f"{key}: always (a pipeline's stages keep what they gather)")
    elif reshard not in ("default", "always"):
        reading.refused.append(f"{key}: {reshard} (allowed: default, always, never)")
    whole = not is_off(section.get("disable_loss_parallel"))
    whole |= "enable_loss_parallel" in section and is_off(section["enable_loss_parallel"])
    if whole and reading.get("tp", 1) > 1:
        reading.refused.append(f"{prefix}disable_loss_parallel: {WHOLE_LOGITS}")
    if reading.get("vpp") and "pipeline_parallel_schedule" in section:
        reading.notes.append("Interleaved1F1B: two chunks on each rank are assumed")


def _model(reading: Reading, section: Mapping[str, Any]) -> None:
    """The name and size of a model, as `llama3` and `8B`."""
    name = str(section.get("name", "")).lower()
    flavor = str(section.get("flavor", ""))
    if name or flavor:
        key = "model.flavor" if flavor else "model.name"
        reading.put("model", f"{name}-{flavor}".strip("-").lower(), key)
    size = SIZE.search(flavor)
    if name == "llama3" and size:
        family = "llama-3.1" if size[1].lower() in ("8b", "70b", "405b") else "llama-3"
        reading.put("model", f"{family}-{size[1].lower()}", "model.flavor")
    if reading.get("zero_stage") is None:
        reading.put("zero_stage", 3, "FSDP2")


def _checkpoint(reading: Reading, section: Mapping[str, Any]) -> None:
    """The mode of activation checkpointing; torchtitan's default is selective, every 2nd layer."""
    mode = str(section.get("mode", "selective"))
    option = str(section.get("selective_ac_option", "2"))
    if mode == "full":
        reading.method = ("full_recompute", {})
    elif mode == "none":
        reading.method = ("keep_all", {})
    elif mode == "selective" and option.isdigit() and int(option) > 0:
        reading.method = ("full_recompute", {"every": int(option)})
    elif mode == "selective" and option == "op":
        reading.method = ("selective(op)", {})
    else:
        reading.refused.append(f"activation_checkpoint.mode: {mode} is not modelled")


def _compiled(reading: Reading, data: Mapping[str, Any]) -> str:
    """The stack of a compiled model; empty if it is eager.  Versions with a section `compile`
    compile the loss too, unless `components` leaves it out."""
    section = data.get("compile")
    new: Mapping[str, Any] = section if isinstance(section, Mapping) else {"enable": section}
    components = new.get("components", ["model", "loss"])
    if not new.get("enable"):
        return "torchtitan-compiled" if (data.get("training") or {}).get("compile") else ""
    if "model" not in components:
        reading.refused.append(
            f"compile.components: {components} (compiling the loss alone is not modelled)"
        )
    return "torchtitan-2025-06" if "loss" in components else "torchtitan-compiled"


def _experts(reading: Reading) -> None:
    """Set the stack (eager versions with EP are torchtitan-2026) and the TP of experts: 1 with EP
    if the file says no other, else that of all layers (torchtitan, parallel_dims.py)."""
    if reading.get("ep", 1) == 1:
        reading.values.pop("etp", None)
        return
    key = reading.keys["ep"]
    if reading.get("etp") is None:
        reading.put("etp", 1, key)
    if reading.system == "torchtitan":
        reading.system = "torchtitan-2026"
    text = "the operators of experts are Megatron-core's fused ones; eager ones hold more"
    reading.notes.append(f"{key}: {text}")


def _batch(reading: Reading) -> None:
    """Set the micro-batch from `local_batch_size`, a rank's sequences of one accumulation step.
    Without a pipeline these are one micro-batch."""
    sequences = reading.values.pop("sequences", None)
    if sequences is None:
        return
    key = reading.keys.pop("sequences")
    if reading.get("pp", 1) > 1:
        micro = reading.get("micro_batch") or sequences // (
            reading.get("accumulation") or sequences
        )
        reading.put("micro_batch", max(1, micro), key)
        reading.put("accumulation", sequences // max(1, micro), key)
    else:
        reading.put("micro_batch", sequences, key)
