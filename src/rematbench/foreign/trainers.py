"""Reads the YAML files of Hugging Face trainers: accelerate, TRL, LLaMA-Factory and axolotl; the
options of their command lines have the same names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rematbench.foreign.adapters import read_adapters
from rematbench.foreign.deepspeed import read_deepspeed, read_zero
from rematbench.foreign.keys import declared, is_off, read_keys
from rematbench.foreign.reading import AUTO, Reading, named_file, switch
from rematbench.foreign.recipes import read_accelerate_recipe
from rematbench.foreign.shell import Script
from rematbench.inputs.configfile import ConfigError, read_mapping

MODELS = ("model_name_or_path", "base_model", "model_name", "model")
PACKING = {"packing", "sample_packing", "neat_packing", "padding_free", "use_remove_padding"}
PACKING |= {"batch_flattening"}
PRECISIONS = {"bf16": "bf16", "pure_bf16": "bf16", "bfloat16": "bf16"}
PRECISIONS |= {"fp16": "fp16", "float16": "fp16", "float32": "fp32"}
RECOMPUTES = {"TRL": True, "ms-swift": True, "Transformers": False}
"""The default of `gradient_checkpointing` by trainer."""
EARLY = "max_seq_length"
"""A key of TRL before 0.20, which computes whole logits and recomputes only if a key says so."""
PIECES = "mst:mlp_chunks=1"
"""The method for a head that is computed in pieces of tokens, as many pieces as the vocabulary is
times wider than the model: TRL's chunks, Liger's fused linear loss (Liger-Kernel 0.8.5,
ops/fused_linear_cross_entropy.py) and, with smaller pieces, Cut Cross Entropy (arXiv
2411.09009)."""
PLUGINS = {"CutCrossEntropyPlugin": PIECES, **dict.fromkeys(("LigerPlugin", "SwanLabPlugin"), "")}
"""axolotl's plugins that are known, with the pieces of the head; the others are refused."""
WIDENS = ("TRL", "LLaMA-Factory")
"""Trainers whose weights are fp32 unless a key says otherwise: TRL 1.16, trainer/model_config.py
(dtype), LLaMA-Factory 0.9.5, model/adapter.py (init_adapter)."""
TASKS = ("pt", "sft")


def read_trainer(data: Mapping[str, Any], file: str, package: str) -> Reading:
    """Read a file of TRL, LLaMA-Factory or axolotl into a Reading.  ConfigError for a wrong
    value."""
    system = "huggingface-deepspeed" if data.get("deepspeed") else "huggingface-flash"
    reading = Reading(file=file, package=package, system=system)
    flat = {key for key in data if key.startswith("fsdp_") and key != "fsdp_config"}
    read_keys(reading, {key: data[key] for key in data if key not in flat}, "trainers")
    for key in MODELS:
        if data.get(key):
            reading.put("model", str(data[key]), key)
    _recomputation(reading, data)
    _kernels(reading, data)
    _task(reading, data)
    if data.get("deepspeed"):
        _nested(reading, data["deepspeed"])
    options = {key: data[key] for key in flat}
    read_keys(reading, options, "trainers", "fsdp_config")
    if not is_off(data.get("fsdp")) or data.get("fsdp_config") or data.get("use_fsdp"):
        _fsdp(reading, data, options)
    if not is_off(data.get("fp8")):
        read_accelerate_recipe(reading, data, "fp8_")
    _precision(reading, data)
    read_adapters(reading, data)
    optimizer = str(data.get("optim") or data.get("optimizer") or "")
    if optimizer.startswith("paged") and "lora_rank" not in reading.values:
        text = "a full device moves its states to the host, which is not modelled"
        reading.refused.append(f"optim: {optimizer}: {text}")
    packed = data.get("model_quantization_config")
    if packed and is_off(_mapping(data, "model_quantization_config_kwargs").get("dequantize")):
        reading.refused.append(f"model_quantization_config: {packed} (weights stay quantised)")
    if not is_off(data.get("torch_empty_cache_steps")):
        reading.notes.append("torch_empty_cache_steps: the time to empty the cache is not counted")
    _packing(reading, data)
    return reading


def _packing(reading: Reading, data: Mapping[str, Any]) -> None:
    """Note how documents are packed; no file gives their mean length.  LLaMA-Factory's `packing`
    and TRL's strategy `wrapped` let attention cross documents; all other packing keeps it inside
    them. Without packing, samples may be shorter than the sequence length."""
    keys = {key for key in PACKING if not is_off(data.get(key))}
    crossing = data.get("packing_strategy") == "wrapped" or (
        reading.package == "LLaMA-Factory" and is_off(data.get("neat_packing"))
    )
    for key in sorted(keys):
        text = "attention crosses documents, so whole sequences are counted"
        if not crossing:
            text = "attention stays inside documents: give --document-len, or whole sequences count"
        reading.notes.append(f"{key}: {text}")
    joined = reading.keys.get("seq_len") == "block_size"  # run_clm.py joins texts (group_texts)
    if not keys and is_off(data.get("pad_to_sequence_len")) and not joined:
        note_cap(reading)


def note_cap(reading: Reading) -> None:
    """Note that the sequence length is an upper bound, because samples are not packed."""
    if "seq_len" in reading.values:
        text = "samples are not packed, so this is an upper bound; shorter samples need less"
        reading.notes.append(f"{reading.keys['seq_len']}: {text} (--seq-len, --sample-len)")


def _precision(reading: Reading, data: Mapping[str, Any]) -> None:
    """Set the precision of the step, and whether weights are fp32 under autocast."""
    for word, precision in PRECISIONS.items():
        value = data.get(word)
        if value not in (AUTO, "full", None) and switch(value, reading.file, word):
            reading.put("precision", precision, word)
    kwargs = _mapping(data, "model_init_kwargs")
    weights = data.get("torch_dtype") or data.get("dtype") or data.get("param_dtype")
    weights = str(weights or kwargs.get("dtype") or kwargs.get("torch_dtype") or "")
    weights = weights.removeprefix("torch.")
    if weights == "float32" and "precision" not in reading.values:
        reading.put("precision", "fp32", "dtype")
    scaled = reading.get("precision") == "fp16"  # torch's GradScaler needs fp32 gradients
    loaded = reading.package == "Transformers" and _older(reading, data)
    widened = scaled or ((reading.package in WIDENS or loaded) and not weights)
    kept = reading.package == "LLaMA-Factory" and data.get("finetuning_type", "lora") != "full"
    wide = weights == "float32" or (widened and not kept)  # if kept, only adapters are fp32
    narrow = reading.get("precision") == "fp32" or not is_off(data.get("pure_bf16"))
    if wide and not narrow:
        reading.put("wide_weights", 1, "dtype")
    if not is_off(data.get("tf32")) and reading.get("precision") == "fp32":
        reading.facts["tf32"] = True


def _recomputation(reading: Reading, data: Mapping[str, Any]) -> None:
    """LLaMA-Factory recomputes unless a key turns it off; the other trainers follow their key."""
    keys = ("gradient_checkpointing", "use_gradient_checkpointing", "activation_checkpointing")
    checkpoint: Any = next((data[key] for key in keys if data.get(key) is not None), None)
    if reading.package == "LLaMA-Factory":
        checkpoint = not data.get("disable_gradient_checkpointing", False)
    if checkpoint is None:
        checkpoint = RECOMPUTES.get(reading.package, False) and EARLY not in data
    kwargs = _mapping(data, "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
    again = data.get("use_reentrant_gc", reading.package in ("axolotl", "LLaMA-Factory"))
    again = kwargs.get("use_reentrant", again)
    again = not is_off(checkpoint) and not is_off(again)
    reading.put("reentrant", again, "gradient_checkpointing_kwargs.use_reentrant")
    moved = data.get("activation_offloading")
    for key, value in (("gradient_checkpointing", checkpoint), ("activation_offloading", moved)):
        if value in ("offload_disk", "disk"):
            reading.refused.append(f"{key}: {value} (inputs of layers on a disk are not modelled)")
    unsloth = not is_off(data.get("use_unsloth_gc"))
    if checkpoint not in ("offload", "offload_disk", "unsloth"):
        on = switch(checkpoint, reading.file, "gradient_checkpointing")
        if not on and not is_off(moved):
            text = "activations on the host without checkpointing are not modelled"
            reading.refused.append(f"activation_offloading: {text}")
        reading.method = ("full_recompute" if on else "keep_all", {})
        if not on or (is_off(moved) and is_off(kwargs.get("offload")) and not unsloth):
            return
    reading.method = ("full_recompute", {"inputs": "host"})


def _mapping(data: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """The first of the sections `names` that is given, which may be a text of a command line."""
    value: Any = next((data[name] for name in names if data.get(name)), {})
    value = yaml.safe_load(value) if isinstance(value, str) else value
    return value if isinstance(value, Mapping) else {}


def _kernels(reading: Reading, data: Mapping[str, Any]) -> None:
    if not is_off(data.get("torch_compile")):
        reading.facts |= {"compiled": True, "norm_keeps_steps": False, "fused_swiglu": True}
    for plugin in data.get("plugins") or ():
        name = plugin.rpartition(".")[2]
        if name not in PLUGINS:
            reading.refused.append(f"plugins: {plugin} is not modelled")
        elif PLUGINS[name]:
            reading.put("pieces", PLUGINS[name], "plugins")
    loss = data.get("loss_type")
    usual = loss is None and EARLY not in data
    if reading.package == "TRL" and (loss == "chunked_nll" or usual):
        reading.put("pieces", PIECES, "loss_type")
        if loss is None:
            reading.notes.append("TRL of 2026 computes the loss in chunks (older: loss_type: nll)")
    if loss not in (None, "nll", "chunked_nll"):
        reading.refused.append(f"loss_type: {loss} (this loss is not modelled)")


def _task(reading: Reading, data: Mapping[str, Any]) -> None:
    """Refuse tasks that do not train one model with one loss."""
    stage = str(data.get("stage", "sft"))
    if stage not in TASKS:
        reading.refused.append(f"stage: {stage} (only pt and sft have one model and one loss)")
    kind = str(data.get("model_type") or "")
    if kind.startswith("AutoModel") and kind != "AutoModelForCausalLM":
        reading.refused.append(f"model_type: the head of {kind} is not that of a language model")
    for key in ("distributed_type", "deepspeed_config"):
        if data.get(key):
            reading.refused.append(f"{key}: it belongs in accelerate's file")


def _nested(reading: Reading, value: Any) -> None:
    """Read a DeepSpeed section, or name the DeepSpeed file to be read."""
    if isinstance(value, Mapping):
        merge(reading, read_deepspeed(value, reading.file))
    elif value is True:
        reading.refused.append("deepspeed: the program makes its own configuration; give --zero")
    else:
        reading.files.append(Path(str(value)))


def merge(reading: Reading, more: Reading) -> None:
    """Add a reading of the same job to a reading.  ConfigError if both give a value and the values
    differ."""
    for name, value in more.values.items():
        wins = reading.command and name in reading.values and name != "model"
        named = name == "model" and more.package == "config.json"  # config.json describes it
        if reading.values.get(name, value) != value and not named:
            here, there = reading.keys.get(name, name), more.keys.get(name, name)
            problem = f"{value}, but {reading.file} has {here}: {reading.values[name]}"
            if not wins:
                raise ConfigError(more.file, there, problem)
            reading.notes.append(f"{more.file}: {there}: {problem}, which is used")
        if wins:
            continue
        reading.put(name, value, more.keys.get(name, name))
    reading.facts |= more.facts
    reading.model |= more.model
    wraps = more.package == "accelerate" and more.method is not None  # accelerate's FSDP recomputes
    if reading.method is None or (wraps and reading.method[0] == "keep_all"):
        reading.method = more.method
    if reading.package != "Megatron":  # Megatron's launch line decides the stack
        reading.system = more.system or reading.system
    for name in ("ignored", "unknown", "refused", "notes", "assumed", "files"):
        getattr(reading, name).extend(getattr(more, name))


def merge_document(reading: Reading, script: Script, name: str) -> None:
    """Add the DeepSpeed configuration `name` that a script writes.  ConfigError if it is no
    JSON."""
    try:
        data = json.loads(script.documents[name])
    except json.JSONDecodeError as error:
        raise ConfigError(script.file, name, f"not JSON ({error})") from error
    merge(reading, read_deepspeed(data, f"{script.file}: {name}"))


SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3}
SHARDING |= {"1": 3, "2": 2, "3": 0, "4": 3}
FSDP_SYSTEM = "huggingface-fsdp2"
FSDP_WORDS = {"auto_wrap", "true", "fsdp2"}
FSDP_WORDS |= {kind.lower() for kind in SHARDING if not kind.isdigit()}
NARROW = {"param_bytes": 2, "grad_bytes": 2, "reduce_bytes": 2}
NARROW |= {"optimizer_bytes": 4, "late_state_bytes": 4}
"""States under axolotl's FSDP2 (0.19.0, monkeypatch/accelerate/fsdp2.py, fsdp2_prepare_model): the
weights stay as they are loaded, where accelerate's own function widens them."""


def _fsdp(reading: Reading, data: Mapping[str, Any], flat: Mapping[str, Any]) -> None:
    """Read FSDP's words and its section; `flat`: keys of the section that stand at the top level.
    FSDP2 shards all states.  With `reshard_after_forward: false` the gathered parameters stay until
    the backward, which is read as ZeRO 2."""
    reading.system = FSDP_SYSTEM
    listed = data.get("fsdp") or ()
    if str(listed).endswith(".json") and named_file(reading.file, listed).is_file():  # ms-swift
        data = {**data, **read_mapping(named_file(reading.file, listed), str(listed))}
        listed = data["fsdp"]
    words = listed if isinstance(listed, list) else str(listed or "").split()
    words = [str(word).lower() for word in words]
    for word in sorted(set(words) - FSDP_WORDS):
        host = "FSDP's parameters on the host are not modelled"
        reading.refused.append(f"fsdp: {word} ({host if word == 'offload' else 'not read'})")
    section = _mapping(data, "fsdp_config") or data.get("fsdp_config") or {}
    if not isinstance(section, Mapping):
        path = named_file(reading.file, section)
        if not path.is_file():
            reading.refused.append(f"fsdp_config: {section} was not found")
        section = read_mapping(path, str(path)) if path.is_file() else {}
    read_keys(reading, section, "trainers", "fsdp_config", "fsdp_config.")
    section = {**flat, **section}
    plain = {str(key).removeprefix("fsdp_"): value for key, value in section.items()}
    kinds = [word for word in words if word.endswith(("shard", "grad_op"))] or ["FULL_SHARD"]
    reshard = str(plain.get("reshard_after_forward", "true")).upper()
    strategy = str(plain.get("sharding_strategy", kinds[0])).upper()
    strategy = reshard if reshard in SHARDING else strategy
    if reshard not in ("TRUE", "FALSE", *SHARDING):
        reading.refused.append(f"fsdp_config.reshard_after_forward: {reshard} is not modelled")
    key = "fsdp_config.sharding_strategy"
    if strategy not in SHARDING:
        raise ConfigError(reading.file, key, f"{strategy} (allowed: {', '.join(SHARDING)})")
    if strategy in ("HYBRID_SHARD", "4"):
        reading.put("inside_node", 1, key)
    reading.put("zero_stage", 2 if reshard == "FALSE" else SHARDING[strategy], key)
    flat_units = _first_fsdp(reading, data, plain, words)
    reading.put("flat_units", flat_units, "fsdp")
    if reading.package == "axolotl" and not flat_units and not data.get("adapter"):
        reading.facts |= NARROW if data.get("bf16") or data.get("bfloat16") else {}
    if not is_off(plain.get("activation_checkpointing")):
        reading.method = ("full_recompute", {})


def _older(reading: Reading, data: Mapping[str, Any]) -> bool:
    """Whether keys show Transformers 4, which also loads weights in fp32 unless a key names a type.
    LLaMA-Factory has them in every version."""
    keys = {*declared("trainers").older, *([EARLY] if reading.package == "TRL" else [])}
    return bool(keys & data.keys()) and reading.package != "LLaMA-Factory"


def _first_fsdp(
    reading: Reading, data: Mapping[str, Any], plain: Mapping[str, Any], words: list[str]
) -> bool:
    """Whether torch's first FSDP runs: as the version says.  Without one, accelerate and axolotl
    take FSDP1; Transformers' Trainer takes FSDP1 in 4.x, as keys may show, and FSDP2 today."""
    if "flat_units" in reading.values:
        return bool(reading.values["flat_units"])
    if "version" in plain or "fsdp2" in words:
        return str(plain.get("version", 2)) != "2"
    kinds = {"hybrid_shard", "hybrid_shard_zero2", "no_shard"} & {*words}
    if is_off(data.get("fsdp")) or reading.package == "axolotl" or kinds or _older(reading, data):
        return True
    reading.assumed.append("fsdp: FSDP2, as Transformers 5 takes (4.x: fsdp_config: {version: 1})")
    return False


def read_accelerate(data: Mapping[str, Any], file: str) -> Reading:
    """Read an accelerate configuration into a Reading.  ConfigError for a wrong value."""
    kind = str(data.get("distributed_type", "NO")).upper()
    reading = Reading(file=file, package="accelerate", system="huggingface-flash")
    sections = ("deepspeed_config", "fsdp_config")
    if str(data.get("mixed_precision")).lower() == "fp8":
        read_accelerate_recipe(reading, data.get("fp8_config") or {}, "fp8_config.")
    read_keys(reading, {key: data[key] for key in data if key not in sections}, "accelerate")
    if kind == "DEEPSPEED":
        reading.system = "huggingface-deepspeed"
        read_accelerate_deepspeed(reading, data.get("deepspeed_config") or {})
    elif kind == "FSDP":
        _fsdp(reading, data, {})
    elif kind in ("MULTI_GPU", "NO"):
        reading.put("zero_stage", 0, "distributed_type")
        if kind == "NO":  # accelerate starts one process, whatever num_processes is
            reading.put("gpus", 1, "distributed_type")
    else:
        reading.refused.append(f"distributed_type: {kind} is not modelled")
    if str((data.get("dynamo_config") or {}).get("dynamo_backend", "no")).lower() == "inductor":
        _kernels(reading, {"torch_compile": True})
    return reading


def read_accelerate_deepspeed(reading: Reading, section: Mapping[str, Any]) -> None:
    """Read accelerate's options for DeepSpeed."""
    read_keys(reading, section, "accelerate", "deepspeed_config", "deepspeed_config.")
    if section.get("deepspeed_config_file"):
        reading.files.append(Path(str(section["deepspeed_config_file"])))
        return
    zero: dict[str, Any] = {"stage": section.get("zero_stage", 2)}
    for word in ("optimizer", "param"):
        zero[f"offload_{word}"] = {"device": section.get(f"offload_{word}_device", "none")}
    read_zero(reading, zero, "deepspeed_config.zero_")
