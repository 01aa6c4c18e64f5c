"""The settings of a traced run of Transformers, as they stand in a job's parameters."""

from typing import ClassVar, Literal, get_args

from msgspec import Struct

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
