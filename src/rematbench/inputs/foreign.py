"""Recognises configuration files of training packages by their keys."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from rematbench.inputs.configfile import read_mapping
from rematbench.inputs.paths import data_dir


@cache
def signs() -> dict[str, list[set[str]]]:
    """By package, sets of keys that each identify its files (config/foreign/signs.yaml)."""
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
"""Packages whose files are recognised but not read."""


def package_of(data: Mapping[str, Any]) -> str | None:
    """The package to whose configuration files a mapping belongs; None for other mappings."""
    keys = set(data)
    known = signs().items()
    return next((name for name, every in known if any(sign <= keys for sign in every)), None)


def pointer(package: str, file: str) -> str:
    """The part of an error that names the package and the command that reads its file."""
    named = f"{'an' if package[0] in 'aAE' else 'a'} {package} configuration"
    if package in REFUSED:
        return f"{named}, which is not read; give its values as options"
    return f"{named}; read it with: rematbench read {file}"
