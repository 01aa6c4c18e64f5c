"""Config.json files of public decoders, and the parameters of their checkpoints; the file beside
this module has them, with their source."""

from pathlib import Path
from typing import Any

import yaml

_READ: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
PUBLIC: dict[str, tuple[dict[str, Any], int]] = {
    name: (it["config"], it["parameters"]) for name, it in _READ.items() if "active" not in it
}
EXPERTS: dict[str, tuple[dict[str, Any], int, int]] = {
    name: (it["config"], it["parameters"], it["active"])
    for name, it in _READ.items()
    if "active" in it
}
"""Mixtures of experts: also the parameters that a token passes."""
