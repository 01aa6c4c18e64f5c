"""Reads what Hugging Face trainers say about adapters and quantised weights.

Sources: PEFT 0.18, tuners/lora/config.py and utils/constants.py; TRL 1.16,
trainer/model_config.py; LLaMA-Factory 0.9.5, hparams/finetuning_args.py and model_args.py; axolotl
0.19, utils/schemas/peft.py and loaders/model.py; ms-swift 4.6.0, swift/arguments.
"""

import re
from collections.abc import Mapping
from typing import Any

from rematbench.foreign.keys import is_off, read_keys
from rematbench.foreign.reading import Reading, number, whole

TUNERS = ("finetuning_type", "adapter", "tuner_type", "train_type")
LORA = {"ms-swift": "tuner_type", "LLaMA-Factory": "finetuning_type"}
"""Trainers that train adapters unless a key says otherwise, with this key."""
SWITCHES = ("use_peft", "use_lora", "lora_enable")
RANKS = ("lora_r", "lora_rank")
TARGETS = ("lora_target_modules", "target_modules", "lora_target")
SAVED = ("lora_modules_to_save", "modules_to_save", "additional_target")
DORA = ("use_dora", "peft_use_dora", "lora_use_dora")
FOUR_BITS = ("load_in_4bit", "q_lora")
BITS = ("quantization_bit", "quant_bits")
METHODS = ("quant_method", "quantization_method")
DOUBLE = ("bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quantization")

EVERY = {"all", "all-linear", "all_linear"}
PATHS = dict.fromkeys(("q", "k", "v", "o"), "self_attn") | dict.fromkeys(
    ("gate", "up", "down"), "mlp"
)
"""The module of a layer that holds each linear."""
LINEARS = {f"{name}_proj": name for name in PATHS}
LINEARS |= {"qkv_proj": "q,k,v", "gate_up_proj": "gate,up", "linear_qkv": "q,k,v"}
LINEARS |= {"linear_proj": "o", "linear_fc1": "gate,up", "linear_fc2": "down"}
LAYERS = range(100)
"""Layers with which a pattern of targets is tried: it must name all of them or none."""
PARTS = {"embed_tokens": "embedding", "lm_head": "head", "norm": "norms"}
USUAL: dict[str, dict[str, Any]] = {
    "TRL": {"rank": 16, "dropout": 0.05, "targets": "q,v", "double": False},
    "LLaMA-Factory": {"rank": 8, "dropout": 0.0, "targets": "all", "double": True},
    "ms-swift": {"rank": 8, "dropout": 0.05, "targets": "all", "double": True},
    "Megatron": {"rank": 8, "dropout": 0.05, "targets": "all", "double": True},
    "axolotl": {"rank": 8, "dropout": 0.0, "targets": "q,v", "double": True},
}
"""Defaults by trainer (Megatron's are those of ms-swift); other trainers have PEFT's."""
PEFT = {"rank": 8, "dropout": 0.0, "targets": "q,v", "double": False}


def read_adapters(reading: Reading, data: Mapping[str, Any]) -> None:
    """Read adapters and quantised weights, once the stack is known.  ConfigError for a wrong
    number."""
    tuned = next((key for key in TUNERS if str(data.get(key)).lower() == "qlora"), "")
    base = _first(data, (*FOUR_BITS, *BITS, "load_in_8bit", "gptq")) or tuned
    if not _adapts(reading, data):
        if base:
            reading.refused.append(f"{base}: quantised weights without adapters are not modelled")
        return
    usual, key = USUAL.get(reading.package, PEFT), _first(data, RANKS)
    rank = whole(data[key], reading.file, key) if key else usual["rank"]
    reading.put("lora_rank", rank, key or _first(data, (*TUNERS, *SWITCHES)))
    _targets(reading, data, usual["targets"])
    rate = data.get("lora_dropout")
    reading.put("lora_dropout", usual["dropout"] if rate is None else
                number(rate, reading.file, "lora_dropout"), "lora_dropout")  # fmt: skip
    _parts(reading, data)
    if _first(data, DORA):
        reading.put("dora", True, _first(data, DORA))
    _dtype(reading, data, packed=bool(base))
    if base:
        reading.put("base_dtype", _format(reading, data, base, usual["double"]), base)


def _dtype(reading: Reading, data: Mapping[str, Any], *, packed: bool) -> None:
    """Set the precision of adapters.  PEFT makes them fp32, and a trainer with autocast computes
    with them in 16 bits (ms-swift always has it: `_init_mixed_precision`).  DeepSpeed and Megatron
    convert them to 16 bits, and so does TRL beside quantised weights (trainer/sft_trainer.py)."""
    narrow = reading.system == "huggingface-deepspeed" or reading.package == "Megatron"
    narrow = narrow or str(data.get("lora_dtype")) in ("bfloat16", "float16", "bf16", "fp16")
    if narrow or not is_off(data.get("pure_bf16")) or (reading.package == "TRL" and packed):
        return
    autocast = any(not is_off(data.get(word)) for word in ("bf16", "fp16"))
    autocast |= reading.package == "TRL"  # TRL's default is bf16
    autocast |= reading.package == "ms-swift" and reading.get("precision") != "fp32"
    reading.put("trained_dtype", "autocast" if autocast else "fp32", "lora_r")
    reading.notes.append("PEFT holds adapters in fp32 (autocast_adapter_dtype)")


def read_peft(data: Mapping[str, Any], file: str) -> Reading:
    """Read PEFT's adapter_config.json, which may stand beside a trainer's file, into a Reading.
    ConfigError for a wrong number."""
    reading = Reading(file=file, package="PEFT")
    read_keys(reading, data, "peft")
    kind = str(data["peft_type"])
    if kind != "LORA":
        reading.refused.append(f"peft_type: {kind} (only LORA is modelled)")
        return reading
    if data.get("base_model_name_or_path"):
        reading.put("model", str(data["base_model_name_or_path"]), "base_model_name_or_path")
    own = {"use_lora": True, "lora_rank": data.get("r", PEFT["rank"]), "bf16": True}
    read_adapters(reading, {**data, **own})
    return reading


def _first(data: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The first of `names` that is given and not off; empty if there is none."""
    return next((name for name in names if not is_off(data.get(name))), "")


def _adapts(reading: Reading, data: Mapping[str, Any]) -> bool:
    """Whether low-rank adapters train.  Other ways to train a part of the model are refused."""
    words = {key: str(data[key]).lower() for key in TUNERS if not is_off(data.get(key))}
    for key, word in words.items():
        if word not in ("full", "lora", "qlora"):
            reading.refused.append(f"{key}: {word} (only full training and LoRA are modelled)")
    if words:
        return any(word in ("lora", "qlora") for word in words.values())
    if reading.package in LORA:
        reading.notes.append(f"{LORA[reading.package]}: lora is {reading.package}'s default")
        return True
    ranks = reading.package == "Transformers" and _first(data, RANKS)
    return bool(_first(data, SWITCHES) or ranks)


def _targets(reading: Reading, data: Mapping[str, Any], usual: str) -> None:
    """Set the linears that have adapters, from the names of their modules."""
    key = _first(data, TARGETS)
    given = data.get(key, []) if key else []
    if not isinstance(given, list):
        pattern = "(" in str(given)
        given = [given] if pattern else re.split(r"[,\s]+", str(given).strip("[] "))
    words = [str(word).strip("'\" ") for word in given]
    if not is_off(data.get("lora_target_linear")) or EVERY & {*words}:
        return
    if not words:
        if usual != "all":
            reading.put("lora_targets", usual, "lora_target_modules")
            reading.notes.append(
                f"no target modules are given: {usual}, PEFT's default for Llama, is assumed"
            )
        return
    if unknown := [word for word in words if not _named(word)]:
        reading.refused.append(f"{key}: {', '.join(unknown)} (known: {', '.join(LINEARS)})")
    if named := ",".join(name for word in words for name in _named(word)):
        reading.put("lora_targets", named, key)


def _named(word: str) -> list[str]:
    """The linears that a target names: by name, by the end of a path, or by a pattern of whole
    paths, as PEFT takes it (tuners/tuners_utils.py, check_target_module_exists)."""
    path, dot, name = word.rpartition(".")
    if name in LINEARS and (not dot or path in PATHS.values()):
        return [LINEARS[name]]
    roots = ("model.layers", "model.language_model.layers")
    try:
        hits = {
            one: {any(re.fullmatch(word, f"{root}.{layer}.{block}.{one}_proj") for root in roots)
                  for layer in LAYERS}
            for one, block in PATHS.items()
        }  # fmt: skip
    except re.error:
        return []
    some = any(len(hit) > 1 for hit in hits.values())  # only some layers have adapters
    return [] if some else [one for one in PATHS if hits[one] == {True}]


def _parts(reading: Reading, data: Mapping[str, Any]) -> None:
    """Set the modules whose own weights train beside the adapters."""
    key = _first(data, SAVED)
    given = data.get(key, []) if key else []
    words = given if isinstance(given, list) else re.split(r"[,\s]+", str(given).strip("[] "))
    found = [PARTS.get(str(word).strip("'\" "), "") for word in words]
    if not all(found):
        reading.refused.append(f"{key}: only {', '.join(PARTS)} can train in addition to adapters")
    elif found:
        reading.put("trained_parts", ",".join(dict.fromkeys(found)), key)


def _format(reading: Reading, data: Mapping[str, Any], key: str, double: bool) -> str:
    eight = key == "load_in_8bit" or str(data.get(key)) == "8"
    method = str(data.get(_first(data, METHODS), "bnb")).lower()
    if method not in ("bnb", "bitsandbytes", "gptq", "awq") and key in BITS:
        why = "has no backward (--base-dtype marlin)" if method == "marlin" else "is not modelled"
        reading.refused.append(f"{_first(data, METHODS)}: {method} {why}")
    if eight or method in ("gptq", "awq") or key == "gptq":
        return "int8" if eight else "int4"
    said = next((data[name] for name in DOUBLE if data.get(name) is not None), double)
    return "nf4" if is_off(said) else "nf4_double"
