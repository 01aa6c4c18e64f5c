"""Reads a DeepSpeed configuration (JSON)."""

from collections.abc import Mapping
from typing import Any

from rematbench.foreign.keys import is_off, read_keys
from rematbench.foreign.reading import AUTO, Reading, number, switch, whole
from rematbench.inputs.configfile import ConfigError

SIZES = {
    "stage3_prefetch_bucket_size": "prefetch_elements",
    "stage3_max_live_parameters": "live_elements",
    "sub_group_size": "sub_group_parameters",
}
"""Keys with a number of parameters, each with the stack's fact that it sets."""
NVME = "states on NVMe are not modelled"
STAGES = (0, 1, 2, 3)


def read_deepspeed(data: Mapping[str, Any], file: str) -> Reading:
    """Read a DeepSpeed configuration into a Reading.  ConfigError for a wrong value."""
    reading = Reading(file=file, package="DeepSpeed", system="huggingface-deepspeed")
    read_keys(
        reading, {key: data[key] for key in data if key[:1] != "_"}, "deepspeed"
    )  # keys with _ first are comments
    for word, precision in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        section = data.get(word)
        if section is not None:
            enabled = section.get("enabled", True) if isinstance(section, Mapping) else section
            if enabled != AUTO and switch(enabled, file, f"{word}.enabled"):
                reading.put("precision", precision, f"{word}.enabled")
    if "zero_optimization" in data:
        read_zero(reading, data["zero_optimization"], "zero_optimization.")
    section = data.get("activation_checkpointing")
    if isinstance(section, Mapping):
        places = {"partition_activations": "partitioned", "cpu_checkpointing": "inputs_on_host"}
        for key, name in places.items():  # the launch line may give the tensor-parallel ranks
            if not is_off(section.get(key)):
                reading.put(name, True, f"activation_checkpointing.{key}")
    if isinstance(data.get("tensor_parallel"), Mapping):
        reading.put("sp", False, "tensor_parallel.")
    return reading


def read_zero(reading: Reading, zero: Any, prefix: str) -> None:
    """Read a section `zero_optimization`: the stage, where the states are (device or host), overlap
    and buckets."""
    if not isinstance(zero, Mapping):
        raise ConfigError(reading.file, prefix.rstrip("."), "expected a section with a stage")
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in STAGES:
        raise ConfigError(reading.file, f"{prefix}stage", f"{stage!r} (allowed: 0, 1, 2, 3)")
    reading.put("zero_stage", stage, f"{prefix}stage")
    _homes(reading, zero, prefix)
    switches = {"overlap_comm": "reduce_overlap", "contiguous_gradients": "whole_buckets"}
    for key, fact in switches.items():
        if zero.get(key, AUTO) != AUTO:
            reading.facts[fact] = switch(zero[key], reading.file, prefix + key)
    if zero.get("reduce_bucket_size", AUTO) != AUTO:
        elements = whole(zero["reduce_bucket_size"], reading.file, f"{prefix}reduce_bucket_size")
        reading.values["bucket_elements"] = elements
    _sizes(reading, zero, prefix)


def _sizes(reading: Reading, zero: Mapping[str, Any], prefix: str) -> None:
    """Read the limits of ZeRO 3.  A prefetch bucket of 0 fetches nothing ahead."""
    for key, fact in SIZES.items():
        value = zero.get(key, zero.get(key.removeprefix("stage3_"), AUTO))
        if value == 0:
            if fact == "prefetch_elements":
                reading.facts["gather_overlap"] = False
            elif key in zero:
                reading.notes.append(f"{prefix}{key}: 0 is read as DeepSpeed's default")
        elif value != AUTO:
            reading.facts[fact] = whole(value, reading.file, f"{prefix}{key}")


def _homes(reading: Reading, zero: Mapping[str, Any], prefix: str) -> None:
    for key, name in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        section = zero.get(key)
        device = section.get("device", "cpu") if isinstance(section, Mapping) else None
        if device == "nvme":
            reading.refused.append(f"{prefix}{key}.device: nvme ({NVME})")
        elif device not in (None, "none"):
            where = f"{prefix}{key}.ratio"
            ratio = number(section.get("ratio", 1), reading.file, where) if section else 1.0
            if ratio != 1:
                reading.put("moved", f"optimizer_offload:share={ratio:g},visiting=0", where)
            else:
                reading.put(name, "host", f"{prefix}{key}.device")
    for key, name in (("cpu_offload", "optimizer"), ("cpu_offload_params", "parameters")):
        if zero.get(key):  # these names are older than DeepSpeed 0.4
            reading.put(name, "host", f"{prefix}{key}")
