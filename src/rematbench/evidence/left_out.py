"""Predictions out of source: published rows predicted with constants that never saw their source.

`config/left_out.csv` has a line per published row.  Rows of a source that constants were fitted to
are predicted with constants refitted without it; rows of other sources with the shipped constants.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any

from rematbench.evidence.accuracy import (
    SPEED,
    Accuracy,
    Row,
    errors_of,
    is_scored,
    members,
    number,
    split_of,
)
from rematbench.evidence.published.sheets import Cell, read_sheet
from rematbench.spec.configfile import ConfigError
from rematbench.spec.constants import Calibration
from rematbench.spec.paths import data_dir

NAME = "left_out.csv"
SHEETS = ("runs.csv", "runs_more.csv")
"""The sheets of published runs; constants are fitted to declared rows of both."""
PEAK = "peak_device_bytes"
REFITTED, SHIPPED = "refitted", "shipped"
SLOPE = "slope_"
LATE = "late_"
LATE_STEP = f"{SLOPE}{LATE}step"
"""Column of the second tangent: ln(step seconds with a slow host / predicted step seconds)."""
PLACE = ("sheet", "row", SPEED, PEAK)


def line_of(sheet: str, index: int, row: Row, scored: Row, how: str) -> Cell:
    """The line of left_out.csv for a row of a sheet; `scored`: the row with its predictions, `how`:
    REFITTED or SHIPPED.  Empty where neither speed nor peak is both published and predicted."""
    if row["status"] != "ok" or not is_scored(row):
        return {}
    line = {"sheet": sheet, "row": str(index + 1), "constants": how}
    for key in (SPEED, PEAK):
        told, made = row[key], number(scored, f"pred_{key}")
        both = bool(told and made)
        line |= {key: told if both else "", f"pred_{key}": f"{made:.5g}" if both else ""}
    slopes = {key: value for key, value in scored.items() if key.startswith(SLOPE)}
    line |= {key: f"{value:.3f}" if line[SPEED] else "" for key, value in slopes.items()}
    return line if line[SPEED] or line[PEAK] else {}


def slope_column(scale: str, *, late: bool = False) -> str:
    """The column of d ln(step seconds) / d ln(scale); `late`: of the tangent with a slow host."""
    return f"{SLOPE}{LATE * late}{scale}"


@cache
def out_of_source() -> tuple[Cell, ...]:
    """The lines of config/left_out.csv, each with the columns of its published row.

    ConfigError where a published row has changed since its prediction.
    """
    lines = read_sheet(
        data_dir("config") / NAME, (*PLACE, "constants", f"pred_{SPEED}", f"pred_{PEAK}")
    )
    sheets = {name: read_sheet(data_dir("published") / name) for name in SHEETS}
    return tuple(joined(line, sheets) for line in lines)


def joined(line: Cell, sheets: Mapping[str, Sequence[Cell]]) -> Cell:
    """A line of left_out.csv with the columns of its published row; ConfigError where the row has
    changed."""
    rows, index = sheets.get(line["sheet"], ()), int(line["row"]) - 1
    row = rows[index] if 0 <= index < len(rows) else {}
    if any(line[key] and line[key] != row.get(key) for key in (SPEED, PEAK)):
        where = f"{line['sheet']} row {line['row']}"
        reason = "another row was predicted (`rematbench calibrate --leave-one-out` makes it anew)"
        raise ConfigError(f"config/{NAME}", where, reason)
    return {**row, **line}


def log_error(row: Row, key: str = SPEED) -> float | None:
    """ln(predicted / published) of a column; None where either value is missing."""
    told, made = number(row, key), number(row, f"pred_{key}")
    return math.log(made / told) if told and made else None


def left_out_by_source(rows: Sequence[Row]) -> dict[str, float]:
    """Mean absolute error of the speeds of every source in lines of left_out.csv."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        error = log_error(row)
        if error is not None:
            found[row["source"]].append(abs(math.expm1(error)))
    return {source: fmean(errors) for source, errors in found.items()}


def left_out_errors(
    rows: Sequence[Row], accuracy: Accuracy, calibration: Calibration
) -> dict[str, float]:
    """Mean absolute error of every group of speeds under refits without the source, over the cells
    to which the shipped constants were not fitted.  Groups without such cells are left out."""
    found: dict[str, float] = {}
    refitted = [row for row in rows if row["constants"] == REFITTED]
    for group in accuracy.groups:
        if group.metric != SPEED:
            continue
        cells = [r for r in members(group, refitted) if split_of(r, group, calibration) != "fitted"]
        errors: list[Any] = errors_of(group.metric, cells)
        if errors:
            found[group.name] = fmean(abs(error) for error in errors)
    return found
