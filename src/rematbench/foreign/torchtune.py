"""Reads a torchtune configuration (YAML): full training, LoRA and QLoRA.

Source of names and defaults: https://github.com/pytorch/torchtune, recipes/configs and
recipes/lora_finetune_*.py: weights, adapters and states have the configuration's dtype; QLoRA holds
linears as torchao's NF4 with quantised scales (torchtune/modules/common_utils.py); ranks shard all
states (recipes/*_distributed.py, training.shard_model).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rematbench.foreign.adapters import read_adapters
from rematbench.foreign.keys import is_off, read_keys
from rematbench.foreign.reading import Reading
from rematbench.foreign.torchtitan import WHOLE_LOGITS
from rematbench.foreign.trainers import note_cap


def read_torchtune(data: Mapping[str, Any], file: str) -> Reading:
    """Read a torchtune configuration into a Reading.  ConfigError for a wrong value."""
    reading = Reading(file=file, package="torchtune", system="torchtitan")
    reading.put("zero_stage", 3, "FSDP2")
    read_keys(reading, data, "torchtune")
    if folder := _section(data, "checkpointer").get("checkpoint_dir"):
        reading.put("model", Path(str(folder)).name, "checkpointer.checkpoint_dir")
    recomputed = not is_off(data.get("enable_activation_checkpointing"))
    moved = not is_off(data.get("enable_activation_offloading"))
    reading.method = ("full_recompute", {"inputs": "host"} if moved else {})
    if not recomputed:
        reading.method = ("keep_all", {})
        if moved:
            text = "activations on the host without checkpointing are not modelled"
            reading.refused.append(f"enable_activation_offloading: {text}")
    read_adapters(reading, _adapters(reading, _section(data, "model")))
    if reading.get("tp", 1) > 1:  # the output's layout is Replicate()
        reading.refused.append(f"tensor_parallel_plan: {WHOLE_LOGITS}")
    for key in ("custom_sharded_layers", "memory_efficient_fsdp_wrap"):
        if not is_off(data.get(key)):
            text = "embedding and head are freed after use, but are counted as kept gathered"
            reading.notes.append(f"{key}: {text}")
    if not is_off(_section(data, "dataset").get("packed")):
        reading.notes.append(
            "dataset.packed: attention stays inside documents: give --document-len"
        )
    else:
        note_cap(reading)
    return reading


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = data.get(name)
    return part if isinstance(part, Mapping) else {}


def _adapters(reading: Reading, model: Mapping[str, Any]) -> dict[str, Any]:
    """The adapters of a model's section, under the names of Hugging Face trainers."""
    builder = str(model.get("_component_", "")).rpartition(".")[2]
    if not builder.startswith(("lora_", "qlora_", "dora_", "qdora_")):
        return {}
    words = [str(w).replace("output_proj", "o_proj") for w in model.get("lora_attn_modules") or ()]
    words += ["gate_proj", "up_proj", "down_proj"] * (not is_off(model.get("apply_lora_to_mlp")))
    if not is_off(model.get("apply_lora_to_output")):
        reading.refused.append("model.apply_lora_to_output: adapters of the head are not modelled")
    packed = builder.startswith("q") or not is_off(model.get("quantize_base"))
    own = {key: model[key] for key in ("lora_rank", "lora_dropout") if key in model}
    switches = dict.fromkeys(("load_in_4bit", "bnb_4bit_use_double_quant"), packed)
    dora = "dora" in builder or not is_off(model.get("use_dora"))
    return {**own, **switches, "lora_target_modules": words, "use_dora": dora} | dict.fromkeys(
        ("use_lora", "pure_bf16"), True
    )
