"""Reads a nanotron configuration (YAML).

Source of names and defaults: https://github.com/huggingface/nanotron, src/nanotron/config/config.py
(TokensArgs, OptimizerArgs), parallelism_config.py (ParallelismArgs: without a word tensor
parallelism all-reduces, and pipelines run all forwards before all backwards, `afab`) and
models_config.py (LlamaConfig, Qwen2Config).
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from rematbench.foreign.deepspeed import read_optimizer
from rematbench.foreign.reading import Reading, read_whole, sort_rest, without_effect

TOKENS = {
    "micro_batch_size": "micro_batch",
    "batch_accumulation_per_replica": "accumulation",
    "sequence_length": "seq_len",
}
DEGREES = {
    "dp": "replicas",
    "tp": "tp",
    "pp": "pp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
}
SHAPES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden",
    "intermediate_size": "ffn",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "vocab_size": "vocab",
}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SECTIONS = {"parallelism", "tokens", "model", "optimizer"}


def read_nanotron(data: Mapping[str, Any], file: str) -> Reading:
    """The reading of a nanotron configuration.  ConfigError for a wrong value."""
    reading = Reading(file=file, package="nanotron", system="megatron-core")
    reading.notes.append("nanotron: the kernels of megatron-core are assumed (--system)")
    tokens, parallel = data.get("tokens") or {}, data.get("parallelism") or {}
    done = read_whole(reading, tokens, TOKENS, "tokens.")
    sort_rest(reading, set(tokens) - done, without_effect, "tokens.")
    done = read_whole(reading, parallel, DEGREES, "parallelism.")
    replicas = reading.values.pop("replicas", None)
    if replicas:
        reading.put(
            "gpus", replicas * prod(reading.get(name, 1) for name in ("tp", "pp", "cp")), "dp"
        )
    mode = str(parallel.get("tp_mode") or "ALL_REDUCE").upper()
    reading.put("sp", mode == "REDUCE_SCATTER", "tp_mode")
    engine = str(parallel.get("pp_engine") or "afab")
    if engine != "1f1b" and reading.get("pp", 1) > 1:
        reading.refused.append(f"parallelism.pp_engine: {engine} (only 1f1b is modelled)")
    recomputes = parallel.get("recompute_layer")
    reading.method = ("full_recompute" if recomputes else "keep_all", {})
    done |= {"tp_mode", "pp_engine", "recompute_layer", "tp_linear_async_communication"}
    sort_rest(reading, set(parallel) - done, without_effect, "parallelism.")
    _model(reading, data.get("model") or {})
    optimizer = data.get("optimizer") or {}
    reading.put("zero_stage", int(optimizer.get("zero_stage") or 0), "optimizer.zero_stage")
    factory = optimizer.get("optimizer_factory") or {}
    read_optimizer(reading, str(factory.get("name", "adamW")), "optimizer.optimizer_factory.name")
    sort_rest(reading, set(data) - SECTIONS, lambda key: key != "moe")
    return reading


def _model(reading: Reading, section: Mapping[str, Any]) -> None:
    dtype = str(section.get("dtype", "bfloat16"))
    if dtype in PRECISIONS:
        reading.put("precision", PRECISIONS[dtype], "model.dtype")
    else:
        reading.refused.append(f"model.dtype: {dtype} is not modelled")
    config = section.get("model_config") or {}
    model = Reading(file=reading.file, package="nanotron")
    done = read_whole(model, config, SHAPES, "model.model_config.")
    reading.model |= model.values
    if config.get("moe_config"):
        reading.refused.append("model.model_config.moe_config: experts are not read")
    heads, hidden = model.get("num_heads"), model.get("hidden")
    if heads and hidden:
        qwen = bool(config.get("is_qwen2_config"))
        reading.model.setdefault("num_kv_heads", heads)
        reading.model |= {
            "head_dim": hidden // heads,
            "mlp": "swiglu",
            "norm": "rmsnorm",
            "position": "rope",
            "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
            "qkv_bias": bool(config.get("attention_bias", qwen)),
        }
    if config.get("hidden_act", "silu") != "silu":
        reading.refused.append(f"model.model_config.hidden_act: {config['hidden_act']}")
    done |= {"tie_word_embeddings", "attention_bias", "hidden_act", "moe_config"}
    rest = set(config) - done
    sort_rest(reading, rest, _config_without_effect, "model.model_config.")


def _config_without_effect(key: str) -> bool:
    names = ("is_llama_config", "is_qwen2_config", "use_cache", "rms_norm_eps", "pretraining_tp")
    positions = key.startswith(("rope_", "max_position")) or key.endswith("_token_id")
    return key in names or positions or key == "initializer_range"
