"""Accuracy as a promise: groups of published cells, their targets, and how errors are counted.

`config/accuracy.yaml` declares the groups.  A cell is `fitted` (a constant was fitted to its
speed), `in-sample` (its source shaped a formula) or `held-out`.  Fitted cells never count as
predictions.
"""

import datetime
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from rematbench.evidence.fit import is_fit, matches
from rematbench.spec.configfile import ConfigError
from rematbench.spec.constants import Calibration, FitRule
from rematbench.spec.paths import data_dir

Row: TypeAlias = Mapping[str, Any]
Metric = Literal["tokens_per_s_per_gpu", "peak_device_bytes", "gain", "verdict", "regret"]
Split = Literal["fitted", "in-sample", "held-out"]
Sheet = Literal["runs.csv", "runs_more.csv"]
MORE: Sheet = "runs_more.csv"
Statistic = Literal["mean", "median", "max", "missed_oom", "false_oom"]
"""`missed_oom` and `false_oom` count cells; the other statistics are fractions of the published
value."""
LEAST_OOMS = 50
"""Least number of published cells out of memory for a promise of their verdicts."""

SPEED: Metric = "tokens_per_s_per_gpu"


class Promise(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A promised statistic: its target, and the value last reached (`accepted`) with the reason and
    the date.  Tests and `rematbench validate` fail where the statistic exceeds `accepted`."""

    target: float
    accepted: float
    reason: str
    date: datetime.date


class Group(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cells scored together: the cells that `rule` selects, one metric, its promised statistics.
    `reported`: statistics that are printed and not promised, each with a remark.

    `sheet`: the sheet of results/published with the cells. `in_sample` names the part of the model
    that these cells shaped without a fit of a constant.
    """

    name: str
    rule: FitRule
    sheet: Sheet = "runs.csv"
    metric: Metric
    promises: dict[Statistic, Promise] = {}
    reported: dict[Statistic, str] = {}
    in_sample: str = ""
    note: str = ""


class Accuracy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of config/accuracy.yaml."""

    groups: tuple[Group, ...]


def load_accuracy() -> Accuracy:
    """The committed targets.  ConfigError with the place of a misspelt key, or of a missed target
    without a reason."""
    path = data_dir("config") / "accuracy.yaml"
    try:
        found = msgspec.yaml.decode(path.read_bytes(), type=Accuracy)
    except msgspec.DecodeError as error:
        raise ConfigError("config/accuracy.yaml", "", str(error)) from error
    for group in found.groups:
        for name, promise in group.promises.items():
            if promise.accepted > promise.target and not promise.reason.strip():
                where = f"{group.name}: {name}"
                raise ConfigError("config/accuracy.yaml", where, "missed without a reason")
    return found


def number(row: Row, key: str) -> float | None:
    """The number in a column of a row; None where the column is missing or empty."""
    value = row.get(key)
    return None if value in ("", None) else float(str(value))


def is_scored(row: Row) -> bool:
    """Whether a published cell can be scored: its status is ok or oom, its note does not call it
    SUSPECT, and its layout is published."""
    known = row["status"] in ("ok", "oom") and "SUSPECT" not in str(row.get("note", ""))
    return known and number(row, "tp") is not None


def members(group: Group, rows: Sequence[Row]) -> list[Row]:
    """The scored cells of a group."""
    return [row for row in rows if is_scored(row) and matches(group.rule, row)]


def split_of(row: Row, group: Group, calibration: Calibration) -> Split:
    """Whether constants were fitted to a cell, its source shaped a formula, or neither.  Constants
    are fitted to speeds only."""
    if group.metric in ("tokens_per_s_per_gpu", "gain") and is_fit(row, calibration.fit):
        return "fitted"
    shaped = any(entry.source in row["source"] for entry in calibration.shaped_by)
    return "in-sample" if shaped or group.in_sample else "held-out"


def ratio_error(row: Row, key: str) -> float | None:
    """Signed relative error of `pred_<key>`; None where the published or the predicted value is
    missing."""
    published, predicted = number(row, key), number(row, f"pred_{key}")
    if published is None or predicted is None or published == 0:
        return None
    return predicted / published - 1.0


def gain_errors(rows: Sequence[Row]) -> list[float]:
    """Predicted less published gain between cells that are neighbours in published speed, as
    fractions (0.06: 6 percentage points of gain)."""
    key = "tokens_per_s_per_gpu"
    pairs = [(number(row, key), number(row, f"pred_{key}")) for row in rows]
    known = sorted((a, b) for a, b in pairs if a and b)
    return [(b1 / b0) - (a1 / a0) for (a0, b0), (a1, b1) in itertools.pairwise(known)]


SWEEP = (
    *("source", "system", "cluster", "model", "layers", "hidden"),
    *("gpus", "seq_len", "global_batch"),
)
"""Columns with equal values in all rows of a sweep: the source, stack, cluster and job."""
LAYOUT = ("tp", "cp", "pp", "vpp", "dp", "zero_stage")
FEWEST_LAYOUTS = 4


def sweeps(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows with a speed or out of memory, by SWEEP, of the jobs that a source ran in at least
    FEWEST_LAYOUTS layouts."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if is_scored(row) and (row["status"] == "oom" or number(row, SPEED)):
            found.setdefault(tuple(str(row.get(key, "")) for key in SWEEP), []).append(row)
    return {
        key: cells
        for key, cells in found.items()
        if len({tuple(row.get(name) for name in LAYOUT) for row in cells}) >= FEWEST_LAYOUTS
    }


def regret(rows: Sequence[Row]) -> float:
    """Share of the best measured speed that a sweep's pick loses.  The pick is the row with the
    highest predicted speed among the rows predicted to fit.  1 where the pick ran out of memory or
    no row is predicted to fit."""
    fitting = [row for row in rows if row["pred_status"] == "ok"]
    pick = max(fitting, key=lambda row: number(row, f"pred_{SPEED}") or 0.0, default=None)
    return 1.0 if pick is None else lost(pick, rows)


def lost(pick: Row, rows: Sequence[Row]) -> float:
    """Share of the best measured speed that a row loses; 1 where the row ran out of memory."""
    return 1.0 - (number(pick, SPEED) or 0.0) / max(number(row, SPEED) or 0.0 for row in rows)


def errors_of(metric: Metric, rows: Sequence[Row]) -> list[float]:
    """Signed errors of a group's cells by its metric; none for verdicts, which are counted."""
    if metric == "verdict":
        return []
    if metric == "gain":
        return gain_errors(rows)
    if metric == "regret":
        return [regret(cells) for cells in sweeps(rows).values()]
    found = (ratio_error(row, metric) for row in rows)
    return [error for error in found if error is not None]


def missed_oom(rows: Sequence[Row]) -> int:
    """Number of cells published as out of memory and predicted to fit."""
    return sum(row["status"] == "oom" and row["pred_status"] == "ok" for row in rows)


def false_oom(rows: Sequence[Row]) -> int:
    """Number of cells published with a result and not predicted to fit."""
    return sum(row["status"] == "ok" and row["pred_status"] != "ok" for row in rows)


OVER_ERRORS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "max": max,
}
OVER_ROWS: dict[str, Callable[[Sequence[Row]], int]] = {
    "missed_oom": missed_oom,
    "false_oom": false_oom,
}


def statistic(name: Statistic, metric: Metric, rows: Sequence[Row]) -> float | None:
    """A statistic of a group's cells; None where no cell can be compared."""
    if name in OVER_ROWS:
        return float(OVER_ROWS[name](rows)) if rows else None
    errors = [abs(error) for error in errors_of(metric, rows)]
    return OVER_ERRORS[name](errors) if errors else None
