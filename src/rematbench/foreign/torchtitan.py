"""Reads a torchtitan configuration (TOML)."""

import re
from collections.abc import Mapping
from typing import Any

from rematbench.foreign.deepspeed import read_optimizer
from rematbench.foreign.reading import (
    Reading,
    read_whole,
    sort_rest,
    switch,
    without_effect,
)

TRAINING = {
    "local_batch_size": "sequences",
    "batch_size": "sequences",
    "global_batch_size": "global_batch",
    "seq_len": "seq_len",
    "tensor_parallel_degree": "tp",
    "context_parallel_degree": "cp",
    "pipeline_parallel_degree": "pp",
    "gradient_accumulation_steps": "accumulation",
}
DEGREES = {
    "tensor_parallel_degree": "tp",
    "context_parallel_degree": "cp",
    "pipeline_parallel_degree": "pp",
    "data_parallel_replicate_degree": "replicas",
    "data_parallel_degree": "shards",
    "data_parallel_shard_degree": "shards",
    "expert_tensor_parallel_degree": "expert_tp",
    "pipeline_parallel_microbatch_size": "micro_batch",
    "pipeline_parallel_microbatches": "accumulation",
    "expert_parallel_degree": "experts",
}
SECTIONS = ("parallelism", "experimental", "training")
"""Sections that held parallel degrees in different versions."""
WITHOUT_EFFECT = (
    *("job", "profiling", "metrics", "lr_scheduler", "checkpoint", "comm", "dataset"),
    *("validation", "debug", "fault_tolerance", "memory_estimation"),
)
SIZE = re.compile(r"(\d+(?:\.\d+)?[bm])$", re.IGNORECASE)
FLOAT8 = ("float8", "mx", "quantize")


def read_torchtitan(data: Mapping[str, Any], file: str) -> Reading:
    """The reading of a torchtitan configuration.  ConfigError for a wrong value."""
    reading = Reading(file=file, package="torchtitan", system="torchtitan")
    done = {"training", "model", "parallelism", "experimental", "activation_checkpoint", "compile"}
    for section in SECTIONS:
        _section(reading, data.get(section) or {}, f"{section}.")
    _model(reading, data.get("model") or {})
    _checkpoint(reading, data.get("activation_checkpoint") or {})
    if _compiles(data):
        reading.system = "torchtitan-compiled"
    done |= {*FLOAT8, "optimizer"}
    _float8(reading, data)
    _optimizer(reading, data.get("optimizer") or {})
    if reading.get("experts", 1) > 1:
        reading.refused.append(
            "parallelism.expert_parallel_degree: experts are not simulated with FSDP"
        )
    _batch(reading)
    for key in sorted(set(data) - done):
        (reading.ignored if key in WITHOUT_EFFECT else reading.unknown).append(key)
    return reading


def _section(reading: Reading, section: Mapping[str, Any], prefix: str) -> None:
    rest = {key for key in (*TRAINING, *DEGREES) if section.get(key) == -1}  # the default
    plain = {key: value for key, value in section.items() if key not in rest}
    done = rest | read_whole(reading, plain, {**TRAINING, **DEGREES}, prefix)
    done |= {
        "fp8_linear",
        "compile",
        "mixed_precision_param",
        "enable_cpu_offload",
        "max_norm",
        "dtype",
    }
    if str(section.get("dtype", "float32")) != "float32":
        key = f"{prefix}dtype: {section['dtype']}"
        reading.refused.append(f"{key} (only states in fp32 are modelled)")
    done |= {"mixed_precision_reduce", "fsdp_reshard_after_forward", "enable_async_tensor_parallel"}
    done |= {"pipeline_parallel_schedule", "enable_loss_parallel", "disable_loss_parallel"}
    if section.get("fp8_linear"):
        reading.refused.append(f"{prefix}fp8_linear: FP8 linears are not modelled")
    if section.get("enable_cpu_offload"):
        key = f"{prefix}enable_cpu_offload"
        reading.refused.append(f"{key}: FSDP's parameters on the host are not modelled")
    if "enable_async_tensor_parallel" in section:
        on = switch(section["enable_async_tensor_parallel"], reading.file, prefix + "async_tp")
        reading.facts["tp_overlap"] = "gemm" if on else "none"
    if str(section.get("fsdp_reshard_after_forward", "default")) == "never":
        reading.put("zero_stage", 2, f"{prefix}fsdp_reshard_after_forward")
    schedule = section.get("pipeline_parallel_schedule")
    if schedule not in (None, "1F1B", "Interleaved1F1B", "GPipe"):
        key = f"{prefix}pipeline_parallel_schedule"
        reading.refused.append(f"{key}: {schedule} (modelled: 1F1B, Interleaved1F1B, GPipe)")
    if schedule == "Interleaved1F1B":
        reading.put("vpp", 2, f"{prefix}pipeline_parallel_schedule")
        reading.notes.append("Interleaved1F1B: two chunks on each rank are assumed")
    precision = section.get("mixed_precision_param", "bfloat16")
    reading.put("precision", {"float32": "fp32"}.get(str(precision), "bf16"), "mixed_precision")
    sort_rest(reading, set(section) - done, without_effect, prefix)


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
    done = {"name", "flavor", "norm_type", "hf_assets_path", "tokenizer_path", "converters"}
    sort_rest(reading, set(section) - done, without_effect, "model.")


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


def _compiles(data: Mapping[str, Any]) -> bool:
    section = data.get("compile")
    old = (data.get("training") or {}).get("compile", False)
    new = section.get("enable", False) if isinstance(section, Mapping) else section
    return bool(old or new)


def _float8(reading: Reading, data: Mapping[str, Any]) -> None:
    """Refuse FP8: `model.converters` of 2025 names it, a switch of 2024 turns it on.  Sections
    about FP8 alone turn nothing on."""
    converters = (data.get("model") or {}).get("converters") or []
    for name in [converters] if isinstance(converters, str) else converters:
        reading.refused.append(f"model.converters: {name} (FP8 linears are not modelled)")
    for key in FLOAT8:
        section = data.get(key)
        switches = ("enable_float8_linear", "enable")
        if isinstance(section, Mapping) and any(section.get(one) for one in switches):
            reading.refused.append(f"{key}: FP8 linears are not modelled")


def _optimizer(reading: Reading, section: Mapping[str, Any]) -> None:
    """Refuse optimizers with other states, and one that steps inside the backward."""
    read_optimizer(reading, str(section.get("name", "AdamW")), "optimizer.name")
    if section.get("early_step_in_backward"):
        key = "optimizer.early_step_in_backward"
        reading.refused.append(f"{key}: a step inside the backward is not modelled")


def _batch(reading: Reading) -> None:
    """`local_batch_size` counts a rank's sequences of one step or accumulation: without pipelines
    these are one micro-batch."""
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
