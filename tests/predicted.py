"""Published rows as predicted with the shipped constants, each once in a process."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from rematbench.evidence.predict import predict_rows
from rematbench.evidence.published.sheets import Cell, Row
from rematbench.evidence.published.words import committed

_MADE: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}


@cache
def published(sheet: str) -> list[Cell]:
    """The rows of results/published/SHEET."""
    return list(committed(sheet))


def predicted(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows with their pred_* columns."""
    keys = [tuple(row.items()) for row in rows]
    new = {key: row for key, row in zip(keys, rows, strict=True) if key not in _MADE}
    _MADE.update(zip(new, predict_rows(list(new.values()), processes=1), strict=True))
    return [dict(_MADE[key]) for key in keys]


def predicted_of(sheet: str, chosen: Callable[[Row], object]) -> list[dict[str, Any]]:
    """The predicted rows of a sheet for which `chosen` is true."""
    return predicted([row for row in published(sheet) if chosen(row)])


def read_of(sheet: str, *precisions: str) -> list[dict[str, Any]]:
    """The predicted rows of a sheet in these precisions (none: in 16 bits), without those that a
    word refuses."""
    wanted = precisions or ("", "bf16", "fp16")
    rows = predicted_of(sheet, lambda row: row.get("precision", "") in wanted)
    return [row for row in rows if row["pred_status"] in ("ok", "oom")]
