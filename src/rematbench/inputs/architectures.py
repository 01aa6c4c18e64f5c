"""How the architectures of Hugging Face are read, as declared in config/architectures.yaml."""

from functools import cache
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from rematbench.inputs.configfile import convert, read_mapping
from rematbench.inputs.paths import data_dir


class Windows(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which layers attend to a window: all but the last (with `first_full`: the first) of every
    `full_every` layers (0: all layers), or all layers from the number in the key `full_before` on.
    `switch`: a key that must be true, otherwise no layer has a window."""

    full_every: int | None = None
    first_full: bool = False
    full_before: str = ""
    switch: str = ""


class Sparse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys that say which layers have experts.  The first layers (as many as the key `after`
    says), the layers after the one in the key `until` and those in the list `but` are dense.  Of
    the others, those whose number (from 1) is a multiple of the key `every` have experts.  The key
    `mlp_layer_types`, which gives the kind of each layer, takes precedence."""

    after: str = ""
    until: str = ""
    but: str = ""
    every: str = ""


class When(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a Model that are set if the config has all keys and values of `condition`."""

    condition: dict[str, Any] = field(name="if")
    facts: dict[str, Any]


class Only(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The only supported value of a key: `value`, or that of the key `same_as`.  `otherwise` names
    the unsupported feature that another value requests."""

    value: Any = None
    same_as: str = ""
    otherwise: str = field(name="else")


class Architecture(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the config of a `model_type` is read as a Model (keys: config/architectures.yaml)."""

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
    """The config keys that architectures share, and the meaning of their values
    (config/huggingface.yaml)."""

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
    """The keys that all architectures share."""
    label = "config/huggingface.yaml"
    return convert(read_mapping(data_dir("config") / "huggingface.yaml", label), Common, label)


@cache
def architectures() -> dict[str, Architecture]:
    """The architectures by `model_type`, each merged with the entry that it extends (`like`)."""
    label = "config/architectures.yaml"
    entries = read_mapping(data_dir("config") / "architectures.yaml", label)["architectures"]
    found: dict[str, Architecture] = {}
    for name, entry in entries.items():
        own = convert(entry, Architecture, f"{label}: {name}")
        found[name] = _extended(found[own.like], own) if own.like else own
    return found


def _extended(base: Architecture, own: Architecture) -> Architecture:
    """The entry `base` extended by `own`, which takes precedence for every Model field that it
    sets as a fact or by a key."""
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
