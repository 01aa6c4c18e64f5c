"""Loads models, clusters and stacks by name, from YAML files, or from a config.json."""

import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from rematbench.inputs.cluster import Cluster
from rematbench.inputs.configfile import (
    ASSUMED,
    ConfigError,
    closest,
    convert,
    flatten,
    read_mapping,
    source_of,
)
from rematbench.inputs.constants import Calibration, load_calibration
from rematbench.inputs.facts import LOSS, check_cluster, check_model, check_system
from rematbench.inputs.foreign import package_of, pointer
from rematbench.inputs.huggingface import is_huggingface, model_from_huggingface
from rematbench.inputs.paths import data_dir
from rematbench.inputs.system import System
from rematbench.workload import Model

Kind = Literal["model", "cluster", "system"]

_FOLDERS: dict[Kind, str] = {"model": "models", "cluster": "clusters", "system": "systems"}
PARTS = ("experts", "latent", "memory")
"""Fields of a model whose values are mappings."""
LAUNCH = (".toml", ".sh")
"""Suffixes of files that describe jobs, never models, clusters or stacks."""


def names(kind: Kind) -> tuple[str, ...]:
    """The sorted names of the shipped models, clusters or stacks."""
    return _stems(_folder(kind))


def load_model(name_or_path: str | Path) -> Model:
    """A Model by name, YAML file, config.json, or a directory that holds a config.json."""
    path = located("model", name_or_path)
    return _shipped_model(path) if _is_shipped(path) else _model(path)


def load_cluster(name_or_path: str | Path) -> Cluster:
    """A Cluster by name or YAML file, with the source of each number in its `sources`."""
    path = located("cluster", name_or_path)
    return _shipped_cluster(path) if _is_shipped(path) else _cluster(path)


@cache
def rated_clusters() -> tuple[Cluster, ...]:
    """The shipped clusters whose GPUs have published rates."""
    shipped = (load_cluster(name) for name in names("cluster"))
    return tuple(cluster for cluster in shipped if not cluster.roofline)


# Why: docs/decisions/costs.md, How fast is a kernel on a GPU with another balance
@cache
def shipped_balances(generation: str) -> tuple[float, float] | None:
    """The smallest and the largest FLOP per HBM byte among shipped GPUs of a generation that have
    rates; None for CPUs and for generations that no shipped cluster has."""
    found = [one.flop_per_byte for one in rated_clusters() if one.generation == generation != "cpu"]
    return (min(found), max(found)) if found else None


def load_system(name_or_path: str | Path) -> System:
    """A System by name, by an alias that its file declares, or by YAML file."""
    path = located("system", name_or_path)
    return _shipped_system(path) if _is_shipped(path) else _system(path)


def calibration(path: Path | None = None) -> Calibration:
    """The calibration constants of the file `path` (None: the shipped one), which is read once."""
    return _calibration(path or data_dir("config") / "calibration.yaml")


def _model(path: Path) -> Model:
    label = _label(path)
    data = read_mapping(path, label)
    _refuse_job(data, label)
    if is_huggingface(data):
        model = model_from_huggingface(data, path)
    else:
        parts = {key: data[key] for key in PARTS if isinstance(data.get(key), dict)}
        parts = {key: part for key, part in parts.items() if "value" not in part}
        values, sources = flatten({k: v for k, v in data.items() if k not in parts}, label)
        values |= parts
        everywhere = data.get("source", "")
        own = [f"{key}: {text}" for key, text in sources.items() if text != everywhere]
        values["source"] = "; ".join([everywhere.strip(), *own] if everywhere else own)
        values["attention_window"] = _windows(values, label)
        model = convert(values, Model, label)
    check_model(model, label)
    return model


def _cluster(path: Path) -> Cluster:
    label = _label(path)
    values, sources, bases = _inherited("cluster", path)
    cluster = convert({**values, "sources": sources}, Cluster, label)
    if bases and "pcie_gpus_per_link" not in read_mapping(path, label):
        fewest = min(cluster.pcie_gpus_per_link, cluster.gpus_per_node)  # the base may have more
        cluster = replace(cluster, pcie_gpus_per_link=fewest)
    entries = calibration().networks
    cluster = replace(cluster, constants=_constants(path, cluster.name, bases, entries))
    check_cluster(cluster, label, calibration().gpus)
    return cluster


def _system(path: Path) -> System:
    label = _label(path)
    values, sources, bases = _inherited("system", path)
    if "loss" in values:
        raise ConfigError(label, "loss", LOSS)
    system = convert({**values, "sources": sources}, System, label)
    system = replace(system, constants=_constants(path, system.name, bases, calibration().systems))
    check_system(system, label)
    return system


def _refuse_job(data: dict[str, Any], label: str) -> None:
    """ConfigError, with the command that reads it, for a training package's configuration."""
    package = package_of(data)
    if package is not None:
        raise ConfigError(label, "", pointer(package, label))


OPEN_FACTS = (
    *("norm", "norm_keeps_steps", "rope", "loss_in_place", "loss_keeps_logits", "repeats_kv"),
    *("eager_operators", "step_scratch_bytes"),
)
"""Facts whose defaults suit only some stacks.  If a user's stack has no base and does not state
one, the value counts as assumed."""
NETWORK = ("nics_per_node", "nic_bytes_per_s")
"""The network of a node, which counts as assumed if a user's cluster file does not state it."""
FOLLOWS: dict[tuple[str, Any], dict[str, Any]] = {
    ("norm", "eager"): {"norm_keeps_steps": True},
    **{("norm", one): {"norm_keeps_steps": False} for one in ("torch", "compiled", "fused")},
    ("compiled", True): {"norm_keeps_steps": False},
    ("attention", "eager"): {"attention": "unfused", "eager_operators": True},
    ("cuda_graphs", True): {"cuda_graphs": "layer"},
    ("cuda_graphs", False): {"cuda_graphs": "none"},
}
"""Facts that a stated fact of a stack implies, unless the file states them.  Eager operators save
what they read (`attention: eager` means torch's, whereas `unfused` has a softmax kernel)."""
NOT_FACTS: dict[Kind, tuple[str, ...]] = {
    "model": (),
    "cluster": ("slurm",),  # rematbench.worlds.slurm.settings reads it
    "system": ("aliases", "rows", "version_of"),
}
"""Keys that say how a file is found or used; files that name it as their base do not inherit
them."""
OWN_KEYS = ("name", "version", "source", "base")
"""Keys that are not facts, so that in a file with a `base` they override nothing."""


def _inherited(
    kind: Kind, path: Path, below: tuple[Path, ...] = ()
) -> tuple[dict[str, Any], dict[str, str], tuple[str, ...]]:
    """(values, sources, bases) of a file: the values of its `base` with the file's overrides, their
    sources, and the names of all bases, nearest first.  ConfigError for an override without a
    source and for bases in a circle."""
    label = _label(path)
    data = read_mapping(path, label)
    _refuse_job(data, label)
    for key in (*NOT_FACTS[kind], "constants", "sources"):
        if key in data and key not in NOT_FACTS[kind]:
            raise ConfigError(label, key, "this key cannot be set in a file")
        data.pop(key, None)
    base = data.pop("base", "")
    values, sources = flatten(data, label)
    if kind == "system":
        values = _with_what_follows(values)
    if not base:
        own = kind == "system" and not _is_shipped(path)
        unsaid = [key for key in OPEN_FACTS if own and key not in values]
        said = f"{ASSUMED}{label} has no base and does not state it"
        return values, {**sources, **dict.fromkeys(unsaid, said)}, ()
    if not isinstance(base, str):
        raise ConfigError(label, "base", f"expected the name or the file of a {kind}")
    try:
        above = located(kind, base)
    except ConfigError as error:
        raise ConfigError(label, "base", str(error)) from error
    if above.resolve() in (path.resolve(), *(other.resolve() for other in below)):
        raise ConfigError(label, "base", f"{base!r} is itself based on this file")
    given, known, bases = _inherited(kind, above, (*below, path))
    own = kind == "cluster" and _is_shipped(above) and not _is_shipped(path)
    if own and not {*NETWORK} & values.keys():
        known = {**known, **dict.fromkeys(NETWORK, f"{ASSUMED}{label} does not state it")}
    sources = {**sources, **_reasons(data, label)}
    return {**given, **values}, {**known, **sources}, (str(given["name"]), *bases)


def _with_what_follows(values: dict[str, Any]) -> dict[str, Any]:
    """A stack's stated facts, completed by those that FOLLOWS derives from them."""
    said = [(pair, more) for pair, more in FOLLOWS.items() if values.get(pair[0]) == pair[1]]
    follows = {key: value for _, more in said for key, value in more.items()}
    replaced = {pair[0] for pair, more in said if pair[0] in more}
    return {**follows, **{key: value for key, value in values.items() if key not in replaced}}


def _reasons(data: dict[str, Any], label: str) -> dict[str, str]:
    """The source of each override in a file with a `base`: that of the key, else of the file."""
    everywhere = str(data.get("source", ""))
    found: dict[str, str] = {}
    for key, entry in data.items():
        if key in OWN_KEYS:
            continue
        sourced = isinstance(entry, dict)
        found[key] = source_of(entry, label, key) if sourced else everywhere
        if not found[key]:
            problem = (
                "a value that overrides the base needs a source: "
                "{value: ..., source: ...}, or `source: mine`"
            )
            raise ConfigError(label, key, problem)
    return found


def _constants(
    path: Path, name: str, bases: tuple[str, ...], entries: Collection[str]
) -> tuple[str, ...]:
    """The entries of config/calibration.yaml that apply to a file: for a shipped file the entry of
    its name, then the entries of its bases.  The name of a user's file does not count, because a
    shipped file of the same name may have other facts."""
    names = (name, *bases) if _is_shipped(path) else bases
    return tuple(name for name in names if name in entries)


@cache
def _stems(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


# Shipped files are cached, because they do not change while a program runs; a user's file may, so
# it is read each time.
_shipped_model = cache(_model)
_shipped_cluster = cache(_cluster)
_shipped_system = cache(_system)
_calibration = cache(load_calibration)


def _is_shipped(path: Path) -> bool:
    return path.is_relative_to(data_dir("config"))


def _folder(kind: Kind) -> Path:
    return data_dir("config") / _FOLDERS[kind]


def is_path(text: str) -> bool:
    """Whether a text is the path of a file or folder, not the name of something shipped."""
    path = Path(text)
    return path.suffix in {".yaml", ".yml", ".json", *LAUNCH} or "/" in text or path.is_dir()


def located(kind: Kind, name_or_path: str | Path) -> Path:
    """The file of a name, an alias or a path; ConfigError if there is none.  A folder takes
    precedence over a shipped name only for models."""
    text = str(name_or_path)
    path = Path(name_or_path)
    aliases = _aliases() if kind == "system" else {}
    folder = path.is_dir()
    if is_path(text) and text not in aliases and (kind == "model" or not folder):
        if folder:
            path = path / "config.json"
        if not path.is_file():
            raise ConfigError(text, "", f"no such {kind} file{_of_a_hub(kind, text)}")
        if path.suffix in LAUNCH:
            why = f"not a {kind} file; read a job with: rematbench read {text}"
            raise ConfigError(text, "", why)
        return path
    stem = aliases.get(text, text)
    known = names(kind)
    if stem not in known:
        hint = closest(stem, [*known, *aliases])
        raise ConfigError("", "", f"unknown {kind} {text!r}{hint} (known: {', '.join(known)})")
    return _folder(kind) / f"{stem}.yaml"


def _of_a_hub(kind: Kind, text: str) -> str:
    """A hint for a model name of the form ORGANISATION/MODEL; empty for other texts."""
    if kind != "model" or not re.fullmatch(r"[\w.-]+/[\w.-]+", text) or text[0] in "./~":
        return ""
    if Path(text).suffix in {".yaml", ".yml", ".json"}:
        return ""
    near = closest(text.partition("/")[2].lower(), names("model"))
    return (
        f": names on the Hugging Face hub are not looked up; pass the path of the model's "
        f"config.json{near}"
    )


@cache
def _of_stacks(key: str) -> dict[str, Any]:
    """`{file stem: value}` of the shipped stacks whose file has a key."""
    paths = {stem: _folder("system") / f"{stem}.yaml" for stem in names("system")}
    files = {stem: read_mapping(path, _label(path)) for stem, path in paths.items()}
    return {stem: data[key] for stem, data in files.items() if key in data}


@cache
def _aliases() -> dict[str, str]:
    """Published names of stacks that differ from file names: `{alias: file stem}`."""
    return {name: stem for stem, listed in _of_stacks("aliases").items() for name in listed}


class RowClaim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which published rows belong to a stack: those that name one of `systems` (a name with * is a
    pattern for versions without a file), and those that name the family `system` and have `note`
    in their note.  `recompute`: the method that each word in the rows' recompute column means."""

    system: str = ""
    systems: tuple[str, ...] = ()
    note: str = ""
    recompute: dict[str, str] = field(default_factory=dict)
    source: str = ""


def claim_of_row(system: str, note: str) -> tuple[str, dict[str, str]]:
    """(stack, methods by word) of a published row, from the first stack whose file claims it under
    `rows`. Without a claim, the stack that the row names in `system`, with the methods of that
    stack's file if one of the file's patterns matches the name."""
    plain, claims = _plain(system), _claimed_rows()
    for stem, claim in claims.items():
        if plain in map(_plain, claim.systems) or (system == claim.system and claim.note in note):
            return stem, claim.recompute
    shipped = {_plain(name): name for name in (*_aliases(), *names("system"))}
    stack = version_of(system) or shipped.get(plain, system)
    own = claims.get(_aliases().get(stack, stack), RowClaim())
    return stack, own.recompute if any(fnmatchcase(plain, name) for name in own.systems) else {}


@cache
def version_of(system: str) -> str:
    """The stack whose pattern (the longest, if several) matches a published name; empty if none
    matches or if a file states the name itself, in any spelling."""
    claims, plain = _claimed_rows(), _plain(system)
    patterns = {name: stem for stem, claim in claims.items() for name in claim.systems}
    families = (claim.system for claim in claims.values())
    if plain in map(_plain, (*names("system"), *_aliases(), *patterns, *families)):
        return ""
    found = [name for name in patterns if "*" in name and fnmatchcase(plain, name)]
    return patterns[max(found, key=len)] if found else ""


def _plain(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.lower())


@cache
def _claimed_rows() -> dict[str, RowClaim]:
    """The claims of published rows, by the file stem of their stack."""
    claims = _of_stacks("rows").items()
    return {stem: convert(claim, RowClaim, f"config/systems/{stem}.yaml") for stem, claim in claims}


def _label(path: Path) -> str:
    """A file's name in errors: config/... for shipped files, else its path."""
    config = data_dir("config")
    return f"config/{path.relative_to(config)}" if path.is_relative_to(config) else str(path)


def _windows(values: dict[str, Any], label: str) -> list[int]:
    """The attention window of each layer in tokens; a shorter list is repeated.  ConfigError if its
    length does not divide the number of layers."""
    window = values.get("attention_window", [])
    layers = values.get("num_layers")
    if not window or not isinstance(window, list) or not isinstance(layers, int):
        return window if isinstance(window, list) else [window]
    if layers % len(window) != 0:
        problem = f"{len(window)} windows do not divide {layers} layers"
        raise ConfigError(label, "attention_window", problem)
    return window * (layers // len(window))
