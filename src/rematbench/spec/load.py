"""Models, clusters and systems by name, by YAML file, or (models) by Hugging Face config.json."""

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from rematbench.cost.constants import Calibration, load_calibration
from rematbench.spec.cluster import Cluster
from rematbench.spec.configfile import ConfigError, closest, convert, flatten, read_mapping
from rematbench.spec.huggingface import is_huggingface, model_from_huggingface
from rematbench.spec.paths import data_dir
from rematbench.spec.system import System
from rematbench.workload import Model

Kind = Literal["model", "cluster", "system"]

_FOLDERS: dict[Kind, str] = {"model": "models", "cluster": "clusters", "system": "systems"}
_FEATURES = (
    "activation_offload",
    "async_tp",
    "compile",
    "optimizer_offload",
    "param_offload",
    "ulysses",
)


def names(kind: Kind) -> list[str]:
    """The names that config/ knows, sorted."""
    return sorted(path.stem for path in _folder(kind).glob("*.yaml"))


def load_model(name_or_path: str | Path) -> Model:
    """A Model by name, YAML file, config.json, or a directory that holds a config.json."""
    path = located("model", name_or_path)
    return _shipped_model(path) if _is_shipped(path) else _model(path)


def load_cluster(name_or_path: str | Path) -> Cluster:
    """A Cluster by name or YAML file; `sources` maps each number to where it comes from."""
    path = located("cluster", name_or_path)
    return _shipped_cluster(path) if _is_shipped(path) else _cluster(path)


def load_system(name_or_path: str | Path) -> System:
    """A System by name, by an alias of config/systems (a published name), or by YAML file."""
    path = located("system", name_or_path)
    return _shipped_system(path) if _is_shipped(path) else _system(path)


def calibration(path: Path | None = None) -> Calibration:
    """The shipped constants, or a file's; each read once.  Its `gpus` are the generations."""
    return _calibration(path or data_dir("config") / "calibration.yaml")


def _model(path: Path) -> Model:
    label = _label(path)
    data = read_mapping(path, label)
    if is_huggingface(data):
        model = model_from_huggingface(data, path)
    else:
        values, sources = flatten(data, label)
        values["source"] = _joined_source(data.get("source", ""), sources)
        values["attention_window"] = _windows(values, label)
        model = convert(values, Model, label)
    _check_model(model, label)
    return model


def _cluster(path: Path) -> Cluster:
    label = _label(path)
    values, sources, bases = _inherited("cluster", path)
    cluster = convert({**values, "sources": sources}, Cluster, label)
    entries = calibration().networks
    cluster = replace(cluster, constants=_constants(path, cluster.name, bases, entries))
    _one_of(cluster.generation, tuple(calibration().gpus), label, "generation")
    if (cluster.non_torch_bytes or 0) >= cluster.hbm_bytes:
        raise ConfigError(label, "non_torch_bytes", "leaves no device memory to the framework")
    return cluster


def _system(path: Path) -> System:
    label = _label(path)
    values, sources, bases = _inherited("system", path)
    system = convert({**values, "sources": sources}, System, label)
    system = replace(system, constants=_constants(path, system.name, bases, calibration().systems))
    for feature in system.features:
        _one_of(feature, _FEATURES, label, "features")
    return system


NOT_FACTS: dict[Kind, tuple[str, ...]] = {
    "model": (),
    "cluster": ("slurm",),  # how to ask for its nodes: rematbench.slurm.settings
    "system": ("aliases", "rows"),
}
"""Keys of a file that say how it is found or used, and are nobody's to inherit."""
OWN_KEYS = ("name", "version", "source", "base")
"""Keys of a file with a `base` that override no fact."""


def _inherited(
    kind: Kind, path: Path, below: tuple[Path, ...] = ()
) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """A file's values and their sources on top of those of its `base`, and the names of its bases,
    the nearest first; ConfigError for an override without a source, or a circle of bases."""
    label = _label(path)
    data = read_mapping(path, label)
    for key in (*NOT_FACTS[kind], "constants", "sources"):
        if key in data and key not in NOT_FACTS[kind]:
            raise ConfigError(label, key, "is set by what reads the file")
        data.pop(key, None)
    base = data.pop("base", "")
    values, sources = flatten(data, label)
    if not base:
        return values, sources, ()
    if not isinstance(base, str):
        raise ConfigError(label, "base", f"expected the name or file of a {kind}")
    above = located(kind, base)
    if above.resolve() in (path.resolve(), *(other.resolve() for other in below)):
        raise ConfigError(label, "base", f"{base!r} is based on this file")
    given, known, bases = _inherited(kind, above, (*below, path))
    sources = {**sources, **_reasons(data, label)}
    return {**given, **values}, {**known, **sources}, (str(given["name"]), *bases)


def _reasons(data: dict[str, Any], label: str) -> dict[str, str]:
    """Why each override is as it is: its own source, or that of the file."""
    everywhere = str(data.get("source", ""))
    found: dict[str, str] = {}
    for key, entry in data.items():
        if key in OWN_KEYS:
            continue
        told = isinstance(entry, dict)
        found[key] = str(entry.get("source", "fitted")) if told else everywhere
        if not found[key]:
            problem = "overrides its base without a source: {value: ..., source: ...}, or mine"
            raise ConfigError(label, key, problem)
    return found


def _constants(
    path: Path, name: str, bases: tuple[str, ...], entries: Collection[str]
) -> tuple[str, ...]:
    """Which `entries` of config/calibration.yaml belong to a file: a shipped file's own, and those
    of its bases.  A name gives a user's file none, for its facts may be others."""
    names = (name, *bases) if _is_shipped(path) else bases
    return tuple(name for name in names if name in entries)


# Shipped files do not change while a program runs; a user's own file may, and is read anew.
_shipped_model = cache(_model)
_shipped_cluster = cache(_cluster)
_shipped_system = cache(_system)
_calibration = cache(load_calibration)


def _is_shipped(path: Path) -> bool:
    return path.is_relative_to(data_dir("config"))


def _folder(kind: Kind) -> Path:
    return data_dir("config") / _FOLDERS[kind]


def located(kind: Kind, name_or_path: str | Path) -> Path:
    """The file behind a name, an alias or a path."""
    text = str(name_or_path)
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml", ".json"} or "/" in text or path.is_dir():
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise ConfigError(text, "", f"no such {kind} file{_of_a_hub(kind, text)}")
        return path
    known = names(kind)
    aliases = _aliases() if kind == "system" else {}
    stem = aliases.get(text, text)
    if stem not in known:
        hint = closest(stem, [*known, *aliases])
        raise ConfigError("", "", f"unknown {kind} {text!r}{hint} (known: {', '.join(known)})")
    return _folder(kind) / f"{stem}.yaml"


def _of_a_hub(kind: Kind, text: str) -> str:
    """What to give in place of ORGANISATION/MODEL, which is looked up nowhere."""
    if kind != "model" or not re.fullmatch(r"[\w.-]+/[\w.-]+", text) or text[0] in "./~":
        return ""
    if Path(text).suffix in {".yaml", ".yml", ".json"}:
        return ""
    near = closest(text.partition("/")[2].lower(), names("model"))
    return (
        ": names of a hub are not looked up; give the path of its config.json, which lies among "
        f"that model's files there{near}"
    )


@cache
def _aliases() -> dict[str, str]:
    """Published system names that are not file names: `{alias: file stem}`."""
    found: dict[str, str] = {}
    for stem in names("system"):
        path = _folder("system") / f"{stem}.yaml"
        data = read_mapping(path, _label(path))
        found.update(dict.fromkeys(data.get("aliases", ()), stem))
    return found


class RowClaim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which published rows are of a stack: those of the family `system` whose note has the text
    `note`; `recompute`: what this stack runs where such a row's recompute column has a word."""

    system: str
    note: str
    recompute: dict[str, str] = field(default_factory=dict)
    source: str = ""


def claim_of_row(system: str, note: str) -> tuple[str, dict[str, str]]:
    """The stack of a published row, by the first file that claims it under `rows`, or what the row
    calls it; and that stack's methods by the row's words."""
    for stem, claim in _claimed_rows().items():
        if system == claim.system and claim.note in note:
            return stem, claim.recompute
    return system, {}


@cache
def _claimed_rows() -> dict[str, RowClaim]:
    """`{file stem: its claim}` of the stacks that claim rows."""
    found: dict[str, RowClaim] = {}
    for stem in names("system"):
        path = _folder("system") / f"{stem}.yaml"
        claim = read_mapping(path, _label(path)).get("rows")
        if claim is not None:
            found[stem] = convert(claim, RowClaim, _label(path))
    return found


def _label(path: Path) -> str:
    """How errors call a file: config/... for the shipped ones, the path as found otherwise."""
    config = data_dir("config")
    return f"config/{path.relative_to(config)}" if path.is_relative_to(config) else str(path)


def _joined_source(everywhere: str, sources: dict[str, str]) -> str:
    """One text for a Model: the file's source and those of single keys."""
    own = [f"{key}: {text}" for key, text in sources.items() if text != everywhere]
    return "; ".join([everywhere.strip(), *own] if everywhere else own)


def _windows(values: dict[str, Any], label: str) -> list[int]:
    """One window (tokens) per layer; a shorter list that divides the layers is repeated."""
    window = values.get("attention_window", [])
    layers = values.get("num_layers")
    if not window or not isinstance(window, list) or not isinstance(layers, int):
        return window if isinstance(window, list) else [window]
    if layers % len(window) != 0:
        problem = f"{len(window)} windows do not divide {layers} layers"
        raise ConfigError(label, "attention_window", problem)
    return window * (layers // len(window))


def _check_model(model: Model, label: str) -> None:
    """Shapes that no decoder can have."""
    if model.num_heads % model.num_kv_heads != 0:
        problem = f"{model.num_kv_heads} KV heads must divide {model.num_heads} heads"
        raise ConfigError(label, "num_kv_heads", problem)
    if model.attention_window and len(model.attention_window) != model.num_layers:
        problem = f"{len(model.attention_window)} windows for {model.num_layers} layers"
        raise ConfigError(label, "attention_window", problem)


def _one_of(value: str, allowed: tuple[str, ...], label: str, key: str) -> None:
    if value not in allowed:
        hint = closest(value, allowed)
        raise ConfigError(label, key, f"{value!r}{hint} (allowed: {', '.join(allowed)})")
