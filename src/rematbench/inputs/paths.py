"""Directories of the shipped data, in a checkout or inside an installed wheel."""

from functools import cache
from pathlib import Path
from typing import Literal

DataKind = Literal["config", "methods", "baselines", "published"]

IN_CHECKOUT: dict[DataKind, str] = {
    "config": "config",
    "methods": "methods",
    "baselines": "baselines",
    "published": "results/published",
}
_PACKAGE = Path(__file__).resolve().parents[1]


def data_dir(kind: DataKind) -> Path:
    """The directory of one kind of shipped data.

    An installed wheel has it in `rematbench/_data`.  A checkout (editable install) uses its
    top-level directories instead, so that edits take effect at once.
    """
    return _PACKAGE / "_data" / kind if _is_wheel() else _PACKAGE.parents[1] / IN_CHECKOUT[kind]


@cache
def _is_wheel() -> bool:
    return (_PACKAGE / "_data").is_dir()
