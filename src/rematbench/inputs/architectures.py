"""The architectures of Hugging Face config.json files, as config/architectures.yaml has them."""

from functools import cache
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from rematbench.inputs.configfile import convert, read_mapping
from rematbench.inputs.paths import data_dir


class Windows(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layers that attend to a window: all except the last (with `first_full`: the first) of
    every `full_every` layers (0: all), or all from the layer number in the key `full_before`.
    `switch`: the key that must be true for any window."""

    full_every: int | None = None
    first_full: bool = False
    full_before: str = ""
    switch: str = ""


class Sparse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which layers have experts: all but the first ones (their number is the value of the key
    `after`), those after the layer in the key `until` and those that the key `but` lists, and of
    these each whose number, from 1, is a multiple of the value of the key `every`.  A file that
    gives the kind of each layer (`mlp_layer_types`) decides by itself."""

    after: str = ""
    until: str = ""
    but: str = ""
    every: str = ""


class When(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a Model that hold if keys of the config have the values of `condition`."""

    condition: dict[str, Any] = field(name="if")
    facts: dict[str, Any]


class Only(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The only supported value of a key (or the key whose value it must equal); `otherwise` names
    the feature that another value requests."""

    value: Any = None
    same_as: str = ""
    otherwise: str = field(name="else")


class Architecture(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the config of a `model_type` gives the facts of a Model (config/architectures.yaml)."""

    like: str = ""
    gated: bool | None = None
    facts: dict[str, Any] = {}
    keys: dict[str, str | tuple[str, ...]] = {}
    defaults: dict[str, Any] = {}
    when: tuple[When, ...] = ()
    only: dict[str, Only] = {}
    windows: Windows | None = None
    sparse: Sparse | None = None
    dequantised: tuple[str, ...] = ()
    rotary: Literal["", "sliding", "no_rope_layers"] = ""
    ffn_per_hidden: int = 0
    times: dict[str, float] = {}
    plus: dict[str, int] = {}


class Common(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys that architectures share, and the words in their values, as config/huggingface.yaml
    has them."""

    shape: dict[str, tuple[str, ...]]
    optional: dict[str, tuple[str, ...]]
    activation: tuple[str, ...]
    gated: dict[str, str]
    plain: dict[str, str]
    steps: dict[str, float]
    rotary: tuple[str, ...]
    ratio: tuple[str, ...]
    window: tuple[str, ...]
    slides: dict[str, bool]
    text: tuple[str, ...]
    encoders: dict[str, str]
    experts: tuple[str, ...]
    features: dict[str, str]


@cache
def common() -> Common:
    """What the architectures share."""
    label = "config/huggingface.yaml"
    return convert(read_mapping(data_dir("config") / "huggingface.yaml", label), Common, label)


@cache
def architectures() -> dict[str, Architecture]:
    """The architectures by `model_type`, each with the entries that it extends."""
    label = "config/architectures.yaml"
    entries = read_mapping(data_dir("config") / "architectures.yaml", label)["architectures"]
    found: dict[str, Architecture] = {}
    for name, entry in entries.items():
        own = convert(entry, Architecture, f"{label}: {name}")
        found[name] = _extended(found[own.like], own) if own.like else own
    return found


def _extended(base: Architecture, own: Architecture) -> Architecture:
    """The entry `own` on top of `base`: a field of a Model that `own` gives, in any way, replaces
    the base's."""
    said = {*own.facts, *own.keys}
    parts: dict[str, Any] = {
        "facts": {k: v for k, v in base.facts.items() if k not in said} | own.facts,
        "keys": {k: v for k, v in base.keys.items() if k not in said} | own.keys,
        "defaults": base.defaults | own.defaults,
        "gated": base.gated if own.gated is None else own.gated,
    }
    for name in {*Architecture.__struct_fields__} - {"like", *parts}:
        parts[name] = getattr(own, name) or getattr(base, name)
    return msgspec.structs.replace(own, **parts)
