"""Reads files of any recognised package, and merges their values."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rematbench.spec.configfile import ConfigError, read_mapping, read_text
from rematbench.spec.foreign import Package, package_of, pointer
from rematbench.spec.huggingface import is_huggingface
from rematbench.spec.jobfiles.deepspeed import read_deepspeed
from rematbench.spec.jobfiles.megatron import is_launch, read_megatron
from rematbench.spec.jobfiles.reading import Reading
from rematbench.spec.jobfiles.torchtitan import read_torchtitan
from rematbench.spec.jobfiles.trainers import merge, read_accelerate, read_trainer

READ = "Megatron launch lines, DeepSpeed JSON, YAML of accelerate, TRL, LLaMA-Factory and axolotl, "
READ += "TOML of torchtitan, and config.json of the model"
STRUCTURED = {".json", ".yaml", ".yml", ".toml"}


def read_files(paths: list[Path]) -> Reading:
    """The values of all files together, and of the files that they name and that exist.
    ConfigError for an unknown kind of file or two different values."""
    readings = [read_file(path) for path in paths]
    whole = max(readings, key=lambda reading: _RANK.index(reading.package))
    present = {path.resolve() for path in paths}
    for reading in readings:
        if reading is not whole:
            merge(whole, reading)
    for path, named in ((path, named) for path in paths for named in list(whole.files)):
        beside = path.parent / named.name
        if beside.is_file() and beside.resolve() not in present:
            present.add(beside.resolve())
            merge(whole, read_file(beside))
    whole.files = [named for named in whole.files if not _read(named, present)]
    if whole.files and not _has_states(whole):
        whole.notes.append(f"{whole.files[0]} is not here: name it after {whole.file}")
    return whole


_RANK = (
    *("config.json", "DeepSpeed", "accelerate", "TRL", "LLaMA-Factory", "axolotl"),
    *("torchtitan", "Megatron"),
)
"""Packages by how much of a job their files say; the file of the last one is the whole job."""


def _read(named: Path, present: set[Path]) -> bool:
    return any(path.name == named.name for path in present)


def _has_states(reading: Reading) -> bool:
    return "zero_stage" in reading.values


def read_file(path: Path) -> Reading:
    """The reading of one file.  ConfigError for a file of an unknown kind."""
    label = str(path)
    if path.suffix not in STRUCTURED:
        return _launch(path, label)
    data = _toml(path, label) if path.suffix == ".toml" else read_mapping(path, label)
    if is_huggingface(data):
        reading = Reading(file=label, package="config.json")
        reading.put("model", label, "config.json")
        return reading
    package = package_of(data)
    if package is None:
        raise ConfigError(label, "", f"not a file that is read (read: {READ})")
    return _package(package, data, label)


def _package(package: Package, data: Mapping[str, Any], label: str) -> Reading:
    if package == "GPT-NeoX":
        raise ConfigError(label, "", pointer(package, label))
    if package == "DeepSpeed":
        return read_deepspeed(data, label)
    if package == "accelerate":
        return read_accelerate(data, label)
    if package == "torchtitan":
        return read_torchtitan(data, label)
    return read_trainer(data, label, package)


def _launch(path: Path, label: str) -> Reading:
    text = read_text(path, label)
    if not is_launch(text):
        problem = f"no launch line with --num-layers and --seq-length (read: {READ})"
        raise ConfigError(label, "", problem)
    return read_megatron(text, label)


def _toml(path: Path, label: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path, label))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(label, "", str(error)) from error
