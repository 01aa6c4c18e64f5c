"""The families of Transformers that are traced, with their configs and classes."""

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from baselines.common.interface import NotRunnable

FAMILIES = ("gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3")


def config_of(data: Mapping[str, Any]) -> PreTrainedConfig:
    """The config for the content of a config.json; NotRunnable for a family that is not traced."""
    kind = str(data.get("model_type", ""))
    if kind not in FAMILIES:
        raise NotRunnable(
            f"model_type {kind!r} of Transformers is not traced (traced: {', '.join(FAMILIES)})"
        )
    return CONFIG_MAPPING[kind].from_dict(dict(data))


def model_class(config: PreTrainedConfig) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
