"""Reads a nanotron configuration (YAML).

Source of names and defaults: https://github.com/huggingface/nanotron, src/nanotron/config/config.py
(TokensArgs, OptimizerArgs), parallelism_config.py (ParallelismArgs: by default tensor
parallelism all-reduces, and pipelines run all forwards before all backwards, `afab`) and
models_config.py (LlamaConfig, Qwen2Config).
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from rematbench.foreign.keys import read_keys
from rematbench.foreign.reading import Reading


def read_nanotron(data: Mapping[str, Any], file: str) -> Reading:
    """Read a nanotron configuration into a Reading.  ConfigError for a wrong value."""
    reading = Reading(file=file, package="nanotron", system="megatron-core")
    reading.notes.append("nanotron: the kernels of megatron-core are assumed (--system)")
    read_keys(reading, data, "nanotron")
    parallel = data.get("parallelism") or {}
    if replicas := reading.values.pop("replicas", None):
        reading.put(
            "gpus", replicas * prod(reading.get(name, 1) for name in ("tp", "pp", "cp")), "dp"
        )
    reading.values.setdefault("sp", False)
    engine = str(parallel.get("pp_engine") or "afab")
    if engine != "1f1b" and reading.get("pp", 1) > 1:
        reading.refused.append(f"parallelism.pp_engine: {engine} (only 1f1b is modelled)")
    recomputes = parallel.get("recompute_layer")
    reading.method = ("full_recompute" if recomputes else "keep_all", {})
    reading.values.setdefault("precision", "bf16")
    optimizer = data.get("optimizer") or {}
    reading.put("zero_stage", int(optimizer.get("zero_stage") or 0), "optimizer.zero_stage")
    _model(reading, (data.get("model") or {}).get("model_config") or {})
    return reading


def _model(reading: Reading, config: Mapping[str, Any]) -> None:
    heads, hidden = reading.model.get("num_heads"), reading.model.get("hidden")
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
