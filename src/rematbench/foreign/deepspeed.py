"""Reads a DeepSpeed configuration (JSON)."""

from collections.abc import Mapping
from typing import Any

from rematbench.foreign.reading import (
    AUTO,
    Reading,
    number,
    read_whole,
    sort_rest,
    switch,
    whole,
    without_effect,
)
from rematbench.inputs.configfile import ConfigError

BATCHES = {
    "train_batch_size": "global_batch",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "sequence_parallel_size": "ulysses",
}
SIZES = {
    "stage3_prefetch_bucket_size": "prefetch_elements",
    "stage3_max_live_parameters": "live_elements",
    "sub_group_size": "sub_group_parameters",
}
"""Numbers of parameters by the fact of the stack that they are."""
NVME = "states on NVMe are not modelled"
STAGES = (0, 1, 2, 3)


def read_deepspeed(data: Mapping[str, Any], file: str) -> Reading:
    """The reading of a DeepSpeed configuration.  ConfigError for a wrong value."""
    reading = Reading(file=file, package="DeepSpeed", system="huggingface-deepspeed")
    done = read_whole(reading, data, BATCHES)
    for word in ("bf16", "fp16"):
        section = data.get(word)
        if section is not None:
            done.add(word)
            enabled = section.get("enabled", True) if isinstance(section, dict) else section
            if enabled != AUTO and switch(enabled, file, f"{word}.enabled"):
                reading.put("precision", word, f"{word}.enabled")
    if "zero_optimization" in data:
        done.add("zero_optimization")
        read_zero(reading, data["zero_optimization"], "zero_optimization.")
    if "activation_checkpointing" in data:
        done.add("activation_checkpointing")
        _checkpointing(reading, data["activation_checkpointing"])
    done |= {key for key in data if str(key).startswith("_")}  # comments
    if isinstance(data.get("tensor_parallel"), Mapping):
        done |= {"tensor_parallel"}
        prefix = "tensor_parallel."
        read = read_whole(reading, data["tensor_parallel"], {"autotp_size": "tp"}, prefix)
        reading.put("sp", False, prefix)
        sort_rest(reading, set(data["tensor_parallel"]) - read, without_effect, prefix)
    if "compression_training" in data:
        reading.refused.append("compression_training: compression is not modelled")
        done.add("compression_training")
    if isinstance(data.get("optimizer"), dict):
        done.add("optimizer")
        read_optimizer(reading, str(data["optimizer"].get("type", "AdamW")), "optimizer.type")
    sort_rest(reading, set(data) - done, without_effect)
    return reading


def read_optimizer(reading: Reading, word: str, key: str) -> None:
    """Refuse an optimizer whose states differ from Adam's."""
    if "adam" not in word.lower() or "8bit" in word.lower() or "onebit" in word.lower():
        reading.refused.append(f"{key}: {word} (only Adam and AdamW are modelled)")


def read_zero(reading: Reading, zero: Any, prefix: str) -> None:
    """Read a section `zero_optimization`: the stage, the memory that holds the states, overlap and
    buckets."""
    if not isinstance(zero, Mapping):
        raise ConfigError(reading.file, prefix.rstrip("."), "expected a section with a stage")
    done = {"stage", "offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params"}
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in STAGES:
        raise ConfigError(reading.file, f"{prefix}stage", f"{stage!r} (allowed: 0, 1, 2, 3)")
    reading.put("zero_stage", stage, f"{prefix}stage")
    _homes(reading, zero, prefix)
    if "overlap_comm" in zero and zero["overlap_comm"] != AUTO:
        done.add("overlap_comm")
        reading.facts["reduce_overlap"] = switch(
            zero["overlap_comm"], reading.file, f"{prefix}overlap_comm"
        )
    done.add("reduce_bucket_size")
    if zero.get("reduce_bucket_size", AUTO) != AUTO:
        elements = whole(zero["reduce_bucket_size"], reading.file, f"{prefix}reduce_bucket_size")
        reading.values["bucket_elements"] = elements
    done |= _sizes(reading, zero, prefix) | _refuse_zero_pp(reading, zero, prefix)
    sort_rest(reading, set(zero) - done, _zero_without_effect, prefix)


def _sizes(reading: Reading, zero: Mapping[str, Any], prefix: str) -> set[str]:
    """Read the limits of ZeRO 3, and whether gradients are copied into buckets; returns the keys
    that were read.  A prefetch bucket of 0 fetches nothing ahead."""
    for key, fact in SIZES.items():
        value = zero.get(key, zero.get(key.removeprefix("stage3_"), AUTO))
        if value == 0:
            if fact == "prefetch_elements":
                reading.facts["gather_overlap"] = False
            elif key in zero:
                reading.notes.append(f"{prefix}{key}: 0 is read as DeepSpeed's default")
        elif value != AUTO:
            reading.facts[fact] = whole(value, reading.file, f"{prefix}{key}")
    if "contiguous_gradients" in zero:
        key = f"{prefix}contiguous_gradients"
        reading.facts["whole_buckets"] = switch(zero["contiguous_gradients"], reading.file, key)
    return {*SIZES, *(key.removeprefix("stage3_") for key in SIZES), "contiguous_gradients"}


def _homes(reading: Reading, zero: Mapping[str, Any], prefix: str) -> None:
    """The homes of optimizer states and parameters."""
    for key, name in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
        section = zero.get(key)
        device = section.get("device", "cpu") if isinstance(section, Mapping) else None
        if device == "nvme":
            reading.refused.append(f"{prefix}{key}.device: nvme ({NVME})")
        elif device not in (None, "none"):
            reading.put(name, "host", f"{prefix}{key}.device")
            where = f"{prefix}{key}.ratio"
            if section and number(section.get("ratio", 1), reading.file, where) != 1:
                reading.refused.append(f"{where}: only all of the states can be on the host")
    for key, name in (("cpu_offload", "optimizer"), ("cpu_offload_params", "parameters")):
        if zero.get(key):  # the names before DeepSpeed 0.4
            reading.put(name, "host", f"{prefix}{key}")


def _refuse_zero_pp(reading: Reading, zero: Mapping[str, Any], prefix: str) -> set[str]:
    """Refuse the options of ZeRO++; returns the keys that were read."""
    degree = zero.get("zero_hpz_partition_size", 1)
    if degree not in (1, AUTO):
        reading.refused.append(f"{prefix}zero_hpz_partition_size: ZeRO++ is not modelled")
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key):
            reading.refused.append(f"{prefix}{key}: ZeRO++ is not modelled")
    return {"zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"}


HARMLESS = {
    *("reduce_scatter", "round_robin_gradients"),
    *("stage3_gather_16bit_weights_on_model_save", "ignore_unused_parameters"),
    *("allgather_partitions", "elastic_checkpoint", "gather_16bit_weights_on_model_save"),
    *("cpu_offload_use_pin_memory", "stage3_gather_fp16_weights_on_model_save"),
}


def _zero_without_effect(key: str) -> bool:
    return key in HARMLESS


def _checkpointing(reading: Reading, section: Any) -> None:
    """Read `activation_checkpointing`; `cpu_checkpointing` moves layer inputs to the host."""
    if not isinstance(section, Mapping):
        return
    if section.get("cpu_checkpointing"):
        reading.method = ("full_recompute", {"inputs": "host"})
    if section.get("partition_activations"):
        key = "activation_checkpointing.partition_activations"
        reading.notes.append(f"{key}: inputs of layers are sharded by rows only with --tp and sp")
