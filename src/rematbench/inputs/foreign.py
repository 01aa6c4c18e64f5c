"""Recognises the configuration files of training packages by their keys."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from rematbench.inputs.configfile import read_mapping
from rematbench.inputs.paths import data_dir


@cache
def signs() -> dict[str, list[set[str]]]:
    """Sets of keys, each of which identifies the files of a package (config/foreign/signs.yaml)."""
    path = data_dir("config") / "foreign" / "signs.yaml"
    packages = read_mapping(path, str(path))["packages"]
    return {package: [*map(set, every)] for package, every in packages.items()}


REFUSED = (
    "GPT-NeoX",
    "LLaMA-Factory v1",
    "LLM-Foundry",
    "NeMo",
    "NeMo-RL",
    "Automodel",
    "verl",
    "EasyR1",
)
"""Packages whose files are recognised and not read."""


def package_of(data: Mapping[str, Any]) -> str | None:
    """The package whose configuration file a mapping is; None for every other mapping."""
    keys = set(data)
    known = signs().items()
    return next((name for name, every in known if any(sign <= keys for sign in every)), None)


def pointer(package: str, file: str) -> str:
    """A sentence that names the package and the command that reads the file."""
    named = f"{'an' if package[0] in 'aAE' else 'a'} {package} configuration"
    if package in REFUSED:
        return f"{named}, which is not read: give its values as options"
    return f"{named}; read it with: rematbench read {file}"
