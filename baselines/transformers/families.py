"""The settings of a traced run of Transformers, and the supported model families with their classes
and configs.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from msgspec import Struct
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from baselines.common.interface import NotRunnable
from rematbench.workload import Model

Family = Literal["gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[str, ...] = get_args(Family)


class Transformers(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a traced run. `family`: Transformers' model_type. `checkpointing`: gradient
    checkpointing of every layer. `holds_output`: the training loop keeps the model's output until
    the backward is over."""

    name: ClassVar[str] = "transformers"
    family: Family = "llama"
    checkpointing: bool = False
    holds_output: bool = False


ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}


class _Keys(NamedTuple):
    config: Callable[[Model], dict[str, Any]]
    fields: tuple[str, ...]
    """Fields of a Model that this family's config can say and that not every config can say."""


def _windows(model: Model) -> list[str]:
    """The `layer_types` of a model; a single entry of `attention_window` is for every layer."""
    windows = model.attention_window or (0,)
    every = windows * model.num_layers if len(windows) == 1 else windows
    return ["sliding_attention" if window else "full_attention" for window in every]


def _window(model: Model) -> int | None:
    return max(model.attention_window, default=0) or None


_KEYS = {
    "llama": _Keys(
        lambda m: {"attention_bias": m.qkv_bias, "mlp_bias": m.mlp_bias},
        ("qkv_bias", "proj_bias", "mlp_bias"),
    ),
    "mistral": _Keys(lambda m: {"sliding_window": _window(m)}, ("attention_window",)),
    "qwen2": _Keys(
        lambda m: {
            "use_sliding_window": _window(m) is not None,
            "sliding_window": _window(m),
            "layer_types": _windows(m),
        },
        ("qkv_bias", "attention_window"),
    ),
    "qwen3": _Keys(lambda m: {"attention_bias": m.qkv_bias}, ("qkv_bias", "proj_bias")),
    "gemma": _Keys(lambda m: {}, ()),
    "gemma2": _Keys(
        lambda m: {
            "sliding_window": _window(m),
            "layer_types": _windows(m),
            "attn_logit_softcapping": m.attention_soft_cap or None,
            "final_logit_softcapping": m.logit_soft_cap or None,
        },
        ("post_norm", "attention_window", "attention_soft_cap", "logit_soft_cap"),
    ),
}
_EVERY = {
    "qkv_bias": False,
    "proj_bias": False,
    "mlp_bias": False,
    "post_norm": False,
    "attention_window": (),
    "attention_soft_cap": 0.0,
    "logit_soft_cap": 0.0,
}
"""Fields that only some families have, with the value that stands for their absence."""


def config_of(data: Mapping[str, Any]) -> PreTrainedConfig:
    """The config for the content of a config.json; NotRunnable for a family that is not traced."""
    kind = str(data.get("model_type", ""))
    _known(kind)
    return CONFIG_MAPPING[kind].from_dict(dict(data))


def config_of_model(model: Model, family: str) -> PreTrainedConfig:
    """The config of a Model in a family; NotRunnable if the family's config cannot express the
    Model."""
    _known(family)
    keys = _KEYS[family]
    for field, plain in _EVERY.items():
        value = getattr(model, field)
        if field not in keys.fields and value != plain and any((value,)):
            raise NotRunnable(f"{model.name}: {family} of Transformers has no {field} ({value!r})")
    for words in model.special_features:
        raise NotRunnable(f"{model.name}: {family} of Transformers has not: {words}")
    if model.norm != "rmsnorm" or model.position != "rope" or model.mlp not in ACTIVATIONS:
        words = f"{model.norm}, {model.position}, {model.mlp}"
        raise NotRunnable(f"{model.name}: {family} of Transformers has no {words}")
    shared = {
        "model_type": family,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_dropout": model.dropout,
        "hidden_act": ACTIVATIONS[model.mlp],
    }
    return config_of({**shared, **keys.config(model)})


def _known(kind: str) -> None:
    if kind not in FAMILIES:
        raise NotRunnable(
            f"model_type {kind!r} of Transformers is not traced (traced: {', '.join(FAMILIES)})"
        )


def model_class(config: PreTrainedConfig) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
