"""Inputs and expected words that a test module reads from the file beside it."""

from pathlib import Path
from typing import Any

import yaml


def tables(module: str) -> dict[str, Any]:
    """The tables of a test module, of whose `__file__` the name with .yaml is read."""
    text = Path(module).with_suffix(".yaml").read_text(encoding="utf-8")
    return yaml.load(text, yaml.CSafeLoader)
