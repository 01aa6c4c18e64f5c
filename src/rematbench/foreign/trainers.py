"""Reads the YAML files of Hugging Face trainers: accelerate, TRL, LLaMA-Factory and axolotl; the
options of their command lines have the same names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rematbench.foreign.deepspeed import read_deepspeed, read_optimizer, read_zero
from rematbench.foreign.reading import (
    AUTO,
    Reading,
    read_whole,
    sort_rest,
    switch,
    without_effect,
)
from rematbench.inputs.configfile import ConfigError

BATCHES = {
    "per_device_train_batch_size": "micro_batch",
    "micro_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "cutoff_len": "seq_len",
    "sequence_len": "seq_len",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "model_max_length": "seq_len",
    "block_size": "seq_len",
    "max_seq_len": "seq_len",
    "sequence_parallel_degree": "cp",
    "sequence_parallel_size": "ulysses",
    "context_parallel_size": "cp",
    "tensor_parallel_size": "tp",
    "dp_shard_size": "shards",
    "dp_replicate_size": "replicas",
}
MODELS = ("model_name_or_path", "base_model", "model_name", "model")
ATTENTION_KEYS = ("flash_attn", "attn_implementation", "attn_impl", "attention", "attn")
ATTENTION = {
    "flash": "fa2",
    "flash_attn": "fa2",
    "flash_attention_2": "fa2",
    "flash_attention_3": "fa3",
    "fa2": "fa2",
    "fa3": "fa3",
    "sdpa": "flash",
    "eager": "unfused",
    "disabled": "unfused",
    "auto": "flash",
    "kernels-community/vllm-flash-attn3": "fa3",
    "kernels-community/flash-attn3": "fa3",
    "kernels-community/flash-attn2": "fa2",
}
ADAPTERS = ("lora", "qlora", "dora", "freeze", "oft", "prompt")
REFUSED = {
    "use_peft": "adapters are not modelled",
    "use_lora": "adapters are not modelled",
    "lora_enable": "adapters are not modelled",
    "lora": "adapters are not modelled",
    "vision_tower": "an encoder of images is not modelled",
    "load_in_4bit": "quantised weights are not modelled",
    "load_in_8bit": "quantised weights are not modelled",
    "use_galore": "GaLore is not modelled",
    "use_apollo": "Apollo is not modelled",
    "use_badam": "BAdam is not modelled",
    "quantization_bit": "quantised weights are not modelled",
    "use_unsloth": "unsloth's kernels are not modelled",
    "fp8": "FP8 is not modelled",
    "alst_sequence_tiling": "give the mini-sequences as a method",
    "tiled_mlp": "give the MLP's mini-sequences as a method",
    "unfrozen_parameters": "frozen parameters are not modelled",
    "flex_attention": "the kernel of flex attention is not modelled",
    "use_hyper_parallel": "its layouts are not modelled",
}
"""Switches that turn on a feature which is not modelled, each with the reason."""
LIGER = ("use_liger_kernel", "enable_liger_kernel", "use_liger")
LIGER_FACTS = {
    "norm": "fused",
    "norm_keeps_steps": False,
    "rope": "fused",
    "fused_swiglu": True,
    "fused_loss": True,
    "loss_in_place": True,
}
"""The facts of Liger's kernels: https://github.com/linkedin/Liger-Kernel, README, "apply all"."""
LIGER_KERNELS = {
    "liger_rope": ("rope",),
    "liger_rms_norm": ("norm", "norm_keeps_steps"),
    "liger_glu_activation": ("fused_swiglu",),
    "liger_swiglu": ("fused_swiglu",),
    "liger_fused_linear_cross_entropy": ("fused_loss", "loss_in_place"),
    "liger_layer_norm": (),
}
"""The facts of each kernel that axolotl's plugin turns on by its own key."""
LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"
PACKING = ("packing", "sample_packing", "neat_packing", "padding_free", "use_remove_padding")
RECOMPUTES = {"TRL": True, "ms-swift": True, "Transformers": False}
"""Whether a trainer recomputes if no key says so: the default of `gradient_checkpointing`."""
TUNERS = ("finetuning_type", "adapter", "tuner_type", "train_type")


def read_trainer(data: Mapping[str, Any], file: str, package: str) -> Reading:
    """The reading of a TRL, LLaMA-Factory or axolotl file.  ConfigError for a wrong value."""
    system = "huggingface-deepspeed" if data.get("deepspeed") else "huggingface-flash"
    reading = Reading(file=file, package=package, system=system)
    done = read_whole(reading, data, BATCHES)
    done |= _model(reading, data) | _precision(reading, data) | _attention(reading, data)
    done |= _recomputation(reading, data) | _kernels(reading, data) | _refuse(reading, data)
    if data.get("deepspeed"):
        done.add("deepspeed")
        _nested(reading, data["deepspeed"])
    for key in ("fsdp", "fsdp_config"):
        if data.get(key):
            done.add(key)
            _fsdp(reading, data[key], f"{key}.")
    if "optim" in data or "optimizer" in data:
        key = "optim" if "optim" in data else "optimizer"
        done.add(key)
        read_optimizer(reading, str(data[key]), key)
    done |= _packing(reading, data) | _defaults(reading, data)
    done |= {key for key, value in data.items() if value is None}
    sort_rest(reading, set(data) - done, without_effect)
    return reading


def _packing(reading: Reading, data: Mapping[str, Any]) -> set[str]:
    """Packed documents, whose mean length no file gives.  LLaMA-Factory's `packing` and TRL's
    strategy `wrapped` let attention cross documents; all other packing keeps it inside them."""
    keys = {key for key in PACKING if data.get(key)}
    crossing = data.get("packing_strategy") == "wrapped" or (
        reading.package == "LLaMA-Factory" and not data.get("neat_packing")
    )
    for key in sorted(keys):
        text = "attention crosses documents, so whole sequences are counted"
        if not crossing:
            text = "attention stays inside documents: --document-len, else whole sequences"
        reading.notes.append(f"{key}: {text}")
    return {*PACKING, "packing_strategy"}


def _defaults(reading: Reading, data: Mapping[str, Any]) -> set[str]:
    """Say what a command line leaves to its trainer: the precision, and ms-swift's adapters."""
    words = ("bf16", "fp16", "torch_dtype", "dtype")
    if reading.package == "Transformers" and not any(data.get(word) for word in words):
        reading.notes.append("neither --bf16 nor --fp16: bf16 is assumed")
    if reading.package == "ms-swift" and not any(data.get(key) for key in TUNERS):
        reading.refused.append("tuner_type: lora is ms-swift's default (adapters are not modelled)")
    return {"rope_scaling", "fsdp_version", "fsdp_transformer_layer_cls_to_wrap", "tf32"}


def _model(reading: Reading, data: Mapping[str, Any]) -> set[str]:
    for key in MODELS:
        if data.get(key):
            reading.put("model", str(data[key]), key)
    return set(MODELS)


def _precision(reading: Reading, data: Mapping[str, Any]) -> set[str]:
    done = set()
    for word in ("bf16", "fp16", "pure_bf16"):
        if word in data:
            done.add(word)
            if data[word] not in (AUTO, "full", None) and switch(data[word], reading.file, word):
                reading.put("precision", word.removeprefix("pure_"), word)
    wide = str(data.get("torch_dtype") or data.get("dtype") or "")
    if wide.removeprefix("torch.") == "float32" and "precision" not in reading.values:
        reading.put("precision", "fp32", "dtype")
    return done | {"torch_dtype", "dtype"}


def _attention(reading: Reading, data: Mapping[str, Any]) -> set[str]:
    done = {"flash_attention", "use_flash_attn", "sdp_attention", *ATTENTION_KEYS}
    for key in ATTENTION_KEYS:
        word = data.get(key)
        if word is None:
            continue
        if word not in ATTENTION:
            reading.refused.append(f"{key}: {word} (allowed: {', '.join(ATTENTION)})")
        else:
            reading.put("attention", ATTENTION[word], key)
    if data.get("flash_attention") or data.get("use_flash_attn"):
        reading.put("attention", "fa2", "flash_attention")
    return done


def _recomputation(reading: Reading, data: Mapping[str, Any]) -> set[str]:
    """LLaMA-Factory recomputes unless a key turns it off; the other trainers follow their key."""
    done = {"gradient_checkpointing", "disable_gradient_checkpointing"}
    done |= {"gradient_checkpointing_kwargs", "activation_offloading", "use_gradient_checkpointing"}
    checkpoint = data.get("gradient_checkpointing", data.get("use_gradient_checkpointing"))
    if reading.package == "LLaMA-Factory":
        checkpoint = not data.get("disable_gradient_checkpointing", False)
    if checkpoint is None:
        checkpoint = RECOMPUTES.get(reading.package, False)
    if checkpoint in ("offload", "offload_disk") or data.get("activation_offloading"):
        reading.method = ("full_recompute", {"inputs": "host"})
    else:
        on = switch(checkpoint, reading.file, "gradient_checkpointing")
        reading.method = ("full_recompute" if on else "keep_all", {})
    return done


def _kernels(reading: Reading, data: Mapping[str, Any]) -> set[str]:
    for key in LIGER:
        if data.get(key) and switch(data[key], reading.file, key):
            reading.facts |= LIGER_FACTS
    if data.get("torch_compile"):
        reading.facts["compiled"] = True
    for key, facts in LIGER_KERNELS.items():
        if data.get(key):
            reading.facts |= {fact: LIGER_FACTS[fact] for fact in facts}
    for plugin in data.get("plugins") or ():
        if plugin != LIGER_PLUGIN:
            reading.refused.append(f"plugins: {plugin} is not modelled")
    return {*LIGER, *LIGER_KERNELS, "torch_compile", "plugins"}


def _refuse(reading: Reading, data: Mapping[str, Any]) -> set[str]:
    for key, why in REFUSED.items():
        if data.get(key):
            reading.refused.append(f"{key}: {why}")
    for key in TUNERS:
        if str(data.get(key, "")).lower() in ADAPTERS:
            reading.refused.append(f"{key}: {data[key]} (adapters are not modelled)")
    stage = str(data.get("stage", "sft"))
    if reading.package in ("LLaMA-Factory", "Transformers") and stage not in ("pt", "sft"):
        reading.refused.append(f"stage: {stage} (only pt and sft have one model and one loss)")
    lora = {key for key in data if str(key).startswith(("lora_", "peft_"))}
    return {*REFUSED, *TUNERS, "stage", *lora}


def _nested(reading: Reading, value: Any) -> None:
    """Read a DeepSpeed section, or name the DeepSpeed file to be read."""
    if isinstance(value, Mapping):
        merge(reading, read_deepspeed(value, reading.file))
    else:
        reading.files.append(Path(str(value)))


def merge(reading: Reading, more: Reading) -> None:
    """Add a reading of the same job to a reading.  ConfigError if both give a value and the values
    differ."""
    for name, value in more.values.items():
        if reading.command and name in reading.values and name != "model":
            continue
        named = name == "model" and more.package == "config.json"  # the file of that name
        if reading.values.get(name, value) != value and not named:
            here, there = reading.keys.get(name, name), more.keys.get(name, name)
            problem = f"{value}, but {reading.file} has {here}: {reading.values[name]}"
            raise ConfigError(more.file, there, problem)
        reading.put(name, value, more.keys.get(name, name))
    reading.facts |= more.facts
    reading.model |= more.model
    reading.method = reading.method or more.method
    if reading.package != "Megatron":  # whose launch line says which of its stacks runs
        reading.system = more.system or reading.system
    for name in ("ignored", "unknown", "refused", "notes", "files"):
        getattr(reading, name).extend(getattr(more, name))


SHARDING = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "1": 3,
    "2": 2,
    "3": 0,
    "4": 3,
}
FSDP_SYSTEM = "torchtitan"


def _fsdp(reading: Reading, section: Any, prefix: str) -> None:
    """Read a section of FSDP.  FSDP2 shards all states; `reshard_after_forward: false` keeps the
    gathered parameters until the backward, as ZeRO-2's gradients with sharded parameters."""
    reading.system = FSDP_SYSTEM
    if not isinstance(section, Mapping):
        words = section if isinstance(section, list) else str(section).split()
        kinds = [str(word).upper() for word in words if "shard" in str(word)]
        section = {"sharding_strategy": (kinds or ["FULL_SHARD"])[0]}
    plain = {str(key).removeprefix("fsdp_"): value for key, value in section.items()}
    strategy = str(plain.get("sharding_strategy", "FULL_SHARD")).upper()
    if strategy not in SHARDING:
        problem = f"{strategy} (allowed: {', '.join(SHARDING)})"
        raise ConfigError(reading.file, f"{prefix}sharding_strategy", problem)
    stage = SHARDING[strategy]
    if "HYBRID" in strategy:
        reading.put("inside_node", 1, f"{prefix}sharding_strategy")
    if str(plain.get("reshard_after_forward", "true")).lower() == "false":
        stage = 2
    reading.put("zero_stage", stage, f"{prefix}sharding_strategy")
    if plain.get("activation_checkpointing"):
        reading.method = ("full_recompute", {})
    if plain.get("offload_params") or plain.get("cpu_offload"):
        reading.refused.append(f"{prefix}offload_params: FSDP's parameters on the host")
    done = {"sharding_strategy", "reshard_after_forward", "activation_checkpointing"}
    done |= {"offload_params", "cpu_offload", "version"}
    sort_rest(reading, set(plain) - done, _fsdp_without_effect, prefix)


def _fsdp_without_effect(key: str) -> bool:
    words = ("auto_wrap", "cls_to_wrap", "state_dict", "sync_module", "cpu_ram", "use_orig", "xla")
    return any(word in key for word in words) or without_effect(key)


PROCESSES = {"num_processes": "gpus", "num_machines": "nodes"}


def read_accelerate(data: Mapping[str, Any], file: str) -> Reading:
    """The reading of an accelerate configuration.  ConfigError for a wrong value."""
    kind = str(data.get("distributed_type", "NO")).upper()
    reading = Reading(file=file, package="accelerate", system="huggingface-flash")
    done = read_whole(reading, data, PROCESSES) | {"distributed_type", "mixed_precision"}
    word = str(data.get("mixed_precision", "no")).lower()
    if word in ("bf16", "fp16"):
        reading.put("precision", word, "mixed_precision")
    elif word == "fp8":
        reading.refused.append("mixed_precision: fp8 (FP8 is not modelled)")
    if kind == "DEEPSPEED":
        reading.system = "huggingface-deepspeed"
        done.add("deepspeed_config")
        read_accelerate_deepspeed(reading, data.get("deepspeed_config") or {})
    elif kind == "FSDP":
        done.add("fsdp_config")
        _fsdp(reading, data.get("fsdp_config") or {}, "fsdp_config.")
    elif kind in ("MULTI_GPU", "NO"):
        reading.put("zero_stage", 0, "distributed_type")
        if kind == "NO":  # accelerate starts one process, whatever num_processes is
            reading.put("gpus", 1, "distributed_type")
    else:
        reading.refused.append(f"distributed_type: {kind} is not modelled")
    if isinstance(data.get("parallelism_config"), Mapping):
        done.add("parallelism_config")
        _parallelism(reading, data["parallelism_config"])
    sort_rest(reading, set(data) - done, without_effect)
    return reading


def read_accelerate_deepspeed(reading: Reading, section: Mapping[str, Any]) -> None:
    """Read the options of accelerate about DeepSpeed."""
    if section.get("deepspeed_config_file"):
        reading.files.append(Path(str(section["deepspeed_config_file"])))
        return
    zero: dict[str, Any] = {"stage": section.get("zero_stage", 2)}
    for word in ("optimizer", "param"):
        device = section.get(f"offload_{word}_device", "none")
        zero[f"offload_{word}"] = {"device": device}
    read_zero(reading, zero, "deepspeed_config.zero_")
    names = {"gradient_accumulation_steps": "accumulation"}
    done = read_whole(reading, section, names, "deepspeed_config.")
    done |= {"zero_stage", "offload_optimizer_device", "offload_param_device", "use_deepspeed"}
    done |= {"zero3_init_flag", "zero3_save_16bit_model"}
    sort_rest(reading, set(section) - done, without_effect, "deepspeed_config.")


def _parallelism(reading: Reading, section: Mapping[str, Any]) -> None:
    prefix = "parallelism_config_"
    names = {"cp_size": "cp", "tp_size": "tp", "sp_size": "ulysses"}
    names |= {"dp_shard_size": "shards", "dp_replicate_size": "replicas"}
    plain = {str(key).removeprefix(prefix): value for key, value in section.items()}
    done = read_whole(reading, plain, names, "parallelism_config.")
    sort_rest(reading, set(plain) - done, without_effect, "parallelism_config.")
