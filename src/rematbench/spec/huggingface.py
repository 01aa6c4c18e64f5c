"""Reads a Hugging Face config.json as a Model; a feature that is not modelled is an error with its
key.

Values that change neither bytes nor FLOPs are ignored (`rope_theta`, `rope_scaling`, epsilons of
norms, initialisation).  The torch runtime uses fixed values for them, equal for all methods.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from rematbench.spec.configfile import ConfigError, closest, convert, validation_problem
from rematbench.workload import Cap, Layers, Length, Model, Width

Config = Mapping[str, Any]

Expansion = Annotated[float, Meta(gt=0.0, le=1024.0)]
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_FEATURES = {
    **dict.fromkeys(_EXPERTS, "experts"),
    "kv_lora_rank": "latent attention (keys and values of low rank)",
    "state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "linear_conv_kernel_dim": "linear-attention layers",
    "vision_config": "an image encoder",
    "audio_config": "an audio encoder",
    "parallel_attn": "attention and MLP side by side",
    "partial_rotary_factor": "rotary positions on a part of a head",
    "encoder_layers": "an encoder",
}
"""Keys of transformers configs, each with the feature that the key adds to an architecture."""
_GATED = {"silu": "swiglu", "swish": "swiglu"}
_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def is_huggingface(data: Config) -> bool:
    """Whether a mapping is a transformers config rather than a model file of rematbench."""
    return "model_type" in data or "architectures" in data


def model_from_huggingface(data: Config, path: Path) -> Model:
    """The Model of a transformers config; its `source` is the file.  ConfigError for a missing key
    or an unmodelled feature."""
    label = str(path)
    kind = data.get("model_type")
    build = _ARCHITECTURES.get(str(kind))
    try:
        given = {key: value for key, value in data.items() if value is not None}
        msgspec.convert(given, _Known)
        if "sliding_window" in data:  # null switches off the architecture's default window
            given.setdefault("sliding_window", None)
    except msgspec.ValidationError as error:
        raise ConfigError(label, *validation_problem(str(error), _Known)) from error
    _refuse(data, label)
    if build is None:
        raise ConfigError(label, "model_type", _unmodelled(str(kind), data))
    try:
        fields = build(given)
    except KeyError as error:
        raise ConfigError(label, str(error.args[0]), "required key is missing") from error
    except Unmodelled as error:
        raise ConfigError(label, error.key, f"{error.reason}, which is not modelled") from error
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    return convert({"name": name, "source": f"Hugging Face config {label}", **fields}, Model, label)


class _Known(TypedDict, total=False):
    """All keys that are read for any architecture, with the allowed values."""

    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    num_key_value_heads: Width
    head_dim: Width
    vocab_size: Width
    max_position_embeddings: Length
    sliding_window: Length
    max_window_layers: Length
    layer_types: list[str]
    attn_logit_softcapping: Cap
    final_logit_softcapping: Cap
    quantization_config: dict[str, Any]
    n_embd: Width
    n_head: Width
    n_layer: Layers
    n_inner: Width
    n_positions: Length
    d_model: Width
    n_heads: Width
    n_layers: Layers
    expansion_ratio: Expansion
    max_seq_len: Length
    attn_config: dict[str, Any]


class Unmodelled(Exception):
    """A key of a transformers config asks for a feature that Model cannot express."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason


def _unmodelled(kind: str, data: Config) -> str:
    """The reason why an architecture is not modelled, from the features in its keys.  No similar
    architecture is suggested, because reading the config as another architecture would drop
    features."""
    known = sorted(_ARCHITECTURES)
    has = dict.fromkeys(words for key, words in _FEATURES.items() if data.get(key))
    why = f"it has {' and '.join(has)}, which is not modelled" if has else "is not modelled"
    typed = closest(kind, known) if kind.replace("-", "_").lower() in known else ""
    return f"{kind!r}: {why}{typed} (modelled: {', '.join(known)})"


def _refuse(data: Config, label: str) -> None:
    """ConfigError for mixture of experts and for quantised (also FP8) checkpoints, in any
    architecture."""
    for key in _EXPERTS:
        if isinstance(data.get(key), int) and data[key] > 1:
            problem = f"mixture of experts ({data[key]} experts) is not modelled"
            raise ConfigError(label, key, problem)
    quantization = data.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "quantised")
        raise ConfigError(label, "quantization_config", f"{method} weights are not modelled")


def _gated_mlp(data: Config) -> str:
    activation = data.get("hidden_act", "silu")
    if activation not in _GATED:
        raise Unmodelled("hidden_act", f"activation {activation!r} in a gated MLP")
    return _GATED[activation]


def _llama_like(data: Config) -> dict[str, Any]:
    """The Model fields that Llama, Mistral, Qwen2, InternLM and Gemma2 configs share."""
    heads = data["num_attention_heads"]
    return {
        "num_layers": data["num_hidden_layers"],
        "hidden": data["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": data.get("num_key_value_heads") or heads,
        "head_dim": data.get("head_dim") or data["hidden_size"] // heads,
        "ffn": data["intermediate_size"],
        "vocab": data["vocab_size"],
        "norm": "rmsnorm",
        "position": "rope",
        "tied_embeddings": data.get("tie_word_embeddings", False),
        "max_positions": data.get("max_position_embeddings", 0),
        "dropout": data.get("attention_dropout", 0.0),
    }


def _llama(data: Config) -> dict[str, Any]:
    bias = data.get("attention_bias", False)
    return {
        **_llama_like(data),
        "mlp": _gated_mlp(data),
        "qkv_bias": bias,
        "proj_bias": bias,
        "mlp_bias": data.get("mlp_bias", False),
    }


def _internlm(data: Config) -> dict[str, Any]:
    bias = data.get("bias", True)
    return {**_llama_like(data), "mlp": _gated_mlp(data), "qkv_bias": bias, "proj_bias": bias}


def _mistral(data: Config) -> dict[str, Any]:
    layers = data["num_hidden_layers"]
    window = data.get("sliding_window")
    return {
        **_llama_like(data),
        "mlp": _gated_mlp(data),
        "attention_window": [window] * layers if window else [],
    }


def _qwen2(data: Config) -> dict[str, Any]:
    layers = data["num_hidden_layers"]
    window = data.get("sliding_window") if data.get("use_sliding_window", False) else None
    full = data.get("max_window_layers", layers)
    return {
        **_llama_like(data),
        "mlp": _gated_mlp(data),
        "qkv_bias": True,
        "attention_window": [0] * full + [window] * (layers - full) if window else [],
    }


def _qwen3(data: Config) -> dict[str, Any]:
    bias = data.get("attention_bias", False)
    return {**_qwen2(data), "qkv_bias": bias, "proj_bias": bias, "qk_norm": True}


def _gemma2(data: Config) -> dict[str, Any]:
    activation = data.get("hidden_activation") or data.get("hidden_act", "gelu_pytorch_tanh")
    if activation not in _GELU:
        raise Unmodelled("hidden_activation", f"activation {activation!r} in a GeGLU MLP")
    layers = data["num_hidden_layers"]
    kinds = data.get("layer_types") or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)
    ]
    window = data.get("sliding_window", 4096)
    bias = data.get("attention_bias", False)
    return {
        **_llama_like(data),
        "mlp": "geglu",
        "tied_embeddings": data.get("tie_word_embeddings", True),
        "qkv_bias": bias,
        "proj_bias": bias,
        "post_norm": True,
        "norm_offset": True,
        "attention_window": [window if kind == "sliding_attention" else 0 for kind in kinds],
        "attention_soft_cap": data.get("attn_logit_softcapping") or 0.0,
        "logit_soft_cap": data.get("final_logit_softcapping") or 0.0,
    }


def _plain_gpt(hidden: int, heads: int, ffn: int, biases: bool) -> dict[str, Any]:
    """Model fields that GPT-2, GPT-NeoX and MPT share: LayerNorm, GELU, multi-head attention."""
    return {
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn": ffn,
        "mlp": "gelu",
        "norm": "layernorm",
        "qkv_bias": biases,
        "proj_bias": biases,
        "mlp_bias": biases,
    }


def _gpt2(data: Config) -> dict[str, Any]:
    if data.get("activation_function", "gelu_new") not in _GELU:
        raise Unmodelled("activation_function", f"{data['activation_function']!r} in place of GELU")
    hidden = data["n_embd"]
    return {
        **_plain_gpt(hidden, data["n_head"], data.get("n_inner") or 4 * hidden, biases=True),
        "num_layers": data["n_layer"],
        "vocab": data["vocab_size"],
        "position": "learned",
        "max_positions": data["n_positions"],
        "tied_embeddings": data.get("tie_word_embeddings", True),
        "dropout": data.get("resid_pdrop", 0.1),
    }


def _gpt_neox(data: Config) -> dict[str, Any]:
    if data.get("use_parallel_residual", True):
        raise Unmodelled("use_parallel_residual", "attention and MLP side by side")
    biases = data.get("attention_bias", True)
    return {
        **_plain_gpt(
            data["hidden_size"], data["num_attention_heads"], data["intermediate_size"], True
        ),
        "num_layers": data["num_hidden_layers"],
        "vocab": data["vocab_size"],
        "position": "rope",
        "max_positions": data.get("max_position_embeddings", 0),
        "tied_embeddings": data.get("tie_word_embeddings", False),
        "qkv_bias": biases,
        "proj_bias": biases,
        "dropout": data.get("hidden_dropout", 0.0),
    }


def _mpt(data: Config) -> dict[str, Any]:
    attention = data.get("attn_config") or {}
    if attention.get("attn_type", "multihead_attention") != "multihead_attention":
        raise Unmodelled("attn_config.attn_type", f"{attention['attn_type']!r} in MPT")
    if attention.get("qk_ln"):
        raise Unmodelled("attn_config.qk_ln", "a norm on queries and keys")
    hidden = data["d_model"]
    ffn = int(data.get("expansion_ratio", 4) * hidden)
    return {
        **_plain_gpt(hidden, data["n_heads"], ffn, not data.get("no_bias", False)),
        "num_layers": data["n_layers"],
        "vocab": data["vocab_size"],
        "position": "alibi" if attention.get("alibi") else "learned",
        "max_positions": data["max_seq_len"],
        "tied_embeddings": True,
        "dropout": data.get("resid_pdrop", 0.0),
    }


_ARCHITECTURES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "internlm": _internlm,
    "llama": _llama,
    "mistral": _mistral,
    "mpt": _mpt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
