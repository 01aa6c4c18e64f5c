"""Groups of published cells, their accuracy targets, and the rules for counting errors.

`config/accuracy.yaml` declares the groups.  A cell is `fitted` (a constant was fitted to its
speed), `in-sample` (its source shaped a formula), `sibling` (constants were fitted to other cells
of its source) or `held-out`.  Fitted cells never count as predictions.  `validate` scores predicted
rows by these groups: errors, the error of a constant MFU, and verdicts on memory.
"""

import datetime
import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

from msgspec import Struct

from rematbench.evidence.decisions import regret, sweeps
from rematbench.evidence.hosted import is_host_fitted, is_update_fitted, node_file, rate_of
from rematbench.evidence.peaks import fits_word
from rematbench.evidence.published.sheets import SPEED, Row, is_scored, number
from rematbench.inputs.configfile import ConfigError, convert, read_mapping
from rematbench.inputs.constants import Calibration, FitRule, is_fit
from rematbench.inputs.load import load_cluster, load_system
from rematbench.inputs.paths import data_dir

OfNode = Literal["host_used_gib", "update_s"]
Metric = Literal["tokens_per_s_per_gpu", "peak_device_bytes", "gain", "verdict", "regret", OfNode]
Split = Literal["fitted", "in-sample", "sibling", "held-out"]
Sheet = Literal["runs.csv", "runs_more.csv", "offloaded_states.csv", "moe.csv", "fp8.csv"]
"""The sheets whose rows are scored."""
RUNS: Sheet = "runs.csv"
MORE: Sheet = "runs_more.csv"
Statistic = Literal["mean", "median", "max", "missed_oom", "false_oom"]
"""`missed_oom` and `false_oom` count cells; the other statistics are fractions of the published
value."""
OF_NODES: dict[str, tuple[Callable[[Row], bool], Callable[[Row], Hashable]]] = {
    "host_used_gib": (is_host_fitted, node_file),
    "update_s": (is_update_fitted, rate_of),
}
"""Metrics whose constants are fitted per node, each with two functions of a row: whether the fit
used the row, and which node or host rate the fitted constant belongs to."""
# Why: docs/decisions/evidence.md, Are out-of-memory verdicts promised?
FEWEST_OOMS = 50
"""Verdicts are promised only if at least this many published cells ran out of memory."""


class Promise(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A promised statistic: its target, and the value last reached (`accepted`) with the reason and
    the date.  Tests and `rematbench validate` fail if the statistic exceeds `accepted`."""

    target: float
    accepted: float
    reason: str
    date: datetime.date


class Group(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cells that `rule` selects, scored together by one metric and its promised statistics.
    `reported`: statistics that are printed but not promised, each with a remark.

    `sheet`: the sheet of results/published with the cells. `without_refused`: rows that are refused
    for a word do not count; a test counts them by sheet. `in_sample` names the part of the model
    that these cells influenced although no constant was fitted to them.
    """

    name: str
    rule: FitRule
    sheet: Sheet = "runs.csv"
    without_refused: bool = False
    metric: Metric
    promises: dict[Statistic, Promise] = {}
    reported: dict[Statistic, str] = {}
    in_sample: str = ""
    note: str = ""


class Accuracy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of config/accuracy.yaml."""

    groups: tuple[Group, ...]


def load_accuracy() -> Accuracy:
    """The committed targets.  ConfigError, with the location, for a misspelt key or for a missed
    target without a reason."""
    path, label = data_dir("config") / "accuracy.yaml", "config/accuracy.yaml"
    found = convert(read_mapping(path, label), Accuracy, label)
    for group in found.groups:
        for name, promise in group.promises.items():
            if promise.accepted > promise.target and not promise.reason.strip():
                raise ConfigError(label, f"{group.name}: {name}", "a missed target needs a reason")
    return found


def of_sheet(rows: Iterable[Row], sheet: Sheet) -> list[Row]:
    """The rows of a sheet; a user's rows, which name no sheet, count as rows of runs.csv."""
    return [row for row in rows if (row.get("sheet") or RUNS) == sheet]


def members(group: Group, rows: Sequence[Row]) -> list[Row]:
    """The rows of a group's sheet that count in the group's score."""
    own = of_sheet(rows, group.sheet)
    if group.without_refused:
        own = [row for row in own if row.get("pred_status") not in ("unsupported", "failed")]
    if group.metric in OF_NODES:  # only nodes with a cluster file have fitted constants
        own = [row for row in own if row["cluster"]]
    return [row for row in own if is_scored(row) and group.rule.matches(row)]


def split_of(row: Row, group: Group, calibration: Calibration) -> Split:
    """Whether a cell is fitted, in-sample, sibling or held-out.  Constants are fitted to speeds,
    except those of a node's host, which are fitted to its host bytes and updates
    (evidence/hosted.py)."""
    if group.metric in OF_NODES:
        return "fitted" if OF_NODES[group.metric][0](row) else "sibling"
    timed = group.metric in (SPEED, "gain")
    if timed and is_fit(row, calibration.fit):
        return "fitted"
    shaped = any(entry.source in row["source"] for entry in calibration.shaped_by)
    if shaped or group.in_sample:
        return "in-sample"
    fitted = timed and any(rule.source in row["source"] for rule in calibration.fit)
    return "sibling" if fitted else "held-out"


def ratio_error(row: Row, key: str) -> float | None:
    """Signed relative error of `pred_<key>`; None if the published or the predicted value is
    missing."""
    published, predicted = number(row, key), number(row, f"pred_{key}")
    if published is None or predicted is None or published == 0:
        return None
    return predicted / published - 1.0


def gain_errors(rows: Sequence[Row]) -> list[float]:
    """Predicted minus published gain between cells with neighbouring published speeds, as fractions
    (0.06: 6 percentage points of gain)."""
    key = "tokens_per_s_per_gpu"
    pairs = [(number(row, key), number(row, f"pred_{key}")) for row in rows]
    known = sorted((a, b) for a, b in pairs if a and b)
    return [(b1 / b0) - (a1 / a0) for (a0, b0), (a1, b1) in itertools.pairwise(known)]


def errors_of(metric: Metric, rows: Sequence[Row]) -> list[float]:
    """Signed errors of a group's cells by its metric; empty for verdicts, which are counts."""
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
    """Number of cells that were published with a result but are not predicted to fit."""
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
    """A statistic of a group's cells; None if no cell can be compared."""
    if name in OVER_ROWS:
        return float(OVER_ROWS[name](rows)) if rows else None
    errors = [abs(error) for error in errors_of(metric, rows)]
    return OVER_ERRORS[name](errors) if errors else None


# -- reports --------------------------------------------------------------------------------------

WHOLE = ("verdict", "regret")
"""Metrics that compare every cell, including cells without a speed."""
Status = Literal["met", "accepted", "FAIL", "reported", "-"]


class Check(Struct, frozen=True, kw_only=True):
    """A statistic with the value reached (None: no cell could be compared).  `target` and
    `accepted` are None if the statistic is reported but not promised."""

    group: str
    statistic: str
    value: float | None
    target: float | None = None
    accepted: float | None = None
    reason: str = ""

    @property
    def status(self) -> Status:
        """met: within the target; accepted: above the target, with a reason; FAIL: above `accepted`
        or without a value; reported: not promised."""
        if self.target is None or self.accepted is None:
            return "reported"
        if self.value is None:
            return "FAIL"
        if self.value <= self.target:
            return "met"
        return "accepted" if self.value <= self.accepted else "FAIL"


class GroupReport(Struct, frozen=True, kw_only=True):
    """Absolute errors of a group's predictions (fitted cells excluded), and two references.

    `floor` is the mean error of one constant MFU, fitted to the cells that the model was fitted to.
    `left_out` is the mean error with constants fitted without the group's source.
    """

    name: str
    metric: str
    splits: dict[Split, int]
    missing: int
    constants: int
    mean: float | None
    median: float | None
    max: float | None
    floor: float | None
    left_out: float | None
    checks: tuple[Check, ...] = ()

    @property
    def cells(self) -> int:
        """The number of cells compared as predictions."""
        return sum(count for split, count in self.splits.items() if split != "fitted")

    @property
    def status(self) -> Status:
        """The worst status of the group's promised checks; `-` without any."""
        found = {check.status for check in self.checks}
        order: tuple[Status, ...] = ("FAIL", "accepted", "met")
        return next((status for status in order if status in found), "-")


class Verdicts(Struct, frozen=True, kw_only=True):
    """Published and predicted verdicts.  `counts` and `headroom_bytes` (negative: predicted not to
    fit) have (published status, predicted status) as keys.  `tight` counts the cells predicted to
    fit with a headroom below the error of peaks."""

    tight: int
    counts: dict[tuple[str, str], int]
    headroom_bytes: dict[tuple[str, str], tuple[float, ...]]

    @property
    def cells(self) -> int:
        """The number of cells with a published verdict."""
        return sum(self.counts.values())

    @property
    def ooms(self) -> int:
        """The number of cells published as out of memory."""
        return sum(count for (told, _), count in self.counts.items() if told == "oom")

    @property
    def right(self) -> float:
        """Share of cells whose predicted verdict is the published verdict."""
        hits = sum(count for (told, said), count in self.counts.items() if told == said)
        return hits / self.cells if self.cells else 0.0

    @property
    def always_fits(self) -> float:
        """Share of correct verdicts if every cell were predicted to fit."""
        hits = sum(count for (told, _), count in self.counts.items() if told == "ok")
        return hits / self.cells if self.cells else 0.0


class Report(Struct, frozen=True, kw_only=True):
    """The scores that `rematbench validate` prints."""

    groups: tuple[GroupReport, ...]
    verdicts: Verdicts

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(c for g in self.groups for c in g.checks if c.status == "FAIL")


def validate(
    rows: Sequence[Row],
    calibration: Calibration,
    accuracy: Accuracy,
    left_out: Mapping[str, float] | None = None,
) -> Report:
    """Score predicted rows (columns of their sheets and pred_*) by the groups of `accuracy`.
    Groups of a sheet other than runs.csv are scored only if `rows` has rows of it.  `left_out`: by
    group, the mean error with constants fitted without its source."""
    own = {name: of_sheet(rows, name) for name in get_args(Sheet)}
    groups = [
        _group_report(g, own[g.sheet], calibration, left_out or {})
        for g in accuracy.groups
        if own[g.sheet] or g.sheet == RUNS
    ]
    return Report(groups=tuple(groups), verdicts=verdicts(own[RUNS]))


def by_source(rows: Sequence[Row]) -> Accuracy:
    """Groups without promises for rows outside the declared groups: one per source and metric."""
    found: dict[str, Group] = {}
    for row in rows:
        source = str(row["source"])
        for metric in (SPEED, "peak_device_bytes"):
            if number(row, metric) is not None:
                name = source if metric == SPEED else f"{source} (peak bytes)"
                rule = FitRule(source=source)
                found[name] = Group(name=name, rule=rule, metric=metric)
    return Accuracy(groups=tuple(found.values()))


def _group_report(
    group: Group, rows: Sequence[Row], calibration: Calibration, left_out: Mapping[str, float]
) -> GroupReport:
    cells = members(group, rows)
    judged = [(row, split_of(row, group, calibration)) for row in cells]
    tested = [row for row, split in judged if split != "fitted"]
    if group.metric in ("gain", "regret"):
        tested = cells
    errors = [abs(error) for error in errors_of(group.metric, tested)]
    reached = {name: over(errors) if errors else None for name, over in OVER_ERRORS.items()}
    floor = _floor(group, rows, tested, calibration)
    return GroupReport(
        name=group.name,
        metric=group.metric,
        splits=_splits(group, judged),
        missing=_missing(group, tested),
        constants=_constants(group, cells, calibration),
        floor=floor,
        left_out=left_out.get(group.name),
        checks=_checks(group, tested, reached["mean"], floor),
        **reached,
    )


def _splits(group: Group, judged: Sequence[tuple[Row, Split]]) -> dict[Split, int]:
    """The number of comparable cells by split (the metrics in WHOLE compare every cell)."""
    counts: dict[Split, int] = dict.fromkeys(get_args(Split), 0)
    key = SPEED if group.metric == "gain" else group.metric
    for row, split in judged:
        counts[split] += group.metric in WHOLE or number(row, key) is not None
    return counts


def _missing(group: Group, tested: Sequence[Row]) -> int:
    """The number of published cells without a prediction."""
    if group.metric in WHOLE:
        return sum(row["pred_status"] not in ("ok", "oom") for row in tested)
    key = SPEED if group.metric == "gain" else group.metric
    published = [row for row in tested if number(row, key) is not None]
    return sum(number(row, f"pred_{key}") is None for row in published)


def _checks(
    group: Group, tested: Sequence[Row], mean: float | None, floor: float | None
) -> tuple[Check, ...]:
    words: list[tuple[Statistic, dict[str, Any]]] = [
        (name, {"target": one.target, "accepted": one.accepted, "reason": one.reason})
        for name, one in group.promises.items()
    ]
    words += [(name, {"reason": remark}) for name, remark in group.reported.items()]
    check = partial(Check, group=group.name)
    checks = [
        check(statistic=name, value=statistic(name, group.metric, tested), **told)
        for name, told in words
    ]
    missing = _missing(group, tested)
    if missing and not set(group.promises) <= OVER_ROWS.keys():
        none = "cells without a prediction"
        checks.append(check(statistic=none, value=missing, target=0.0, accepted=0.0))
    if floor is not None and mean is not None and group.promises:
        below = math.nextafter(floor, 0.0)
        checks.append(check(statistic="mean below floor", value=mean, target=below, accepted=below))
    return tuple(checks)


def _constants(group: Group, cells: Sequence[Row], calibration: Calibration) -> int:
    """The number of fitted constants that a group's predictions depend on."""
    if group.metric in OF_NODES:
        return len({OF_NODES[group.metric][1](row) for row in cells})
    owners: set[str] = set()
    for row in cells:
        try:
            cluster, system = load_cluster(row["cluster"]), load_system(row["system"])
        except ConfigError:  # the status of a user's row says what is wrong
            continue
        owners |= {
            f"gpus.{cluster.generation}",
            f"networks.{cluster.name}",
            f"systems.{system.name}",
        }
    return sum(name.rpartition(".")[0] in owners for name in calibration.fitted)


def _floor(
    group: Group, rows: Sequence[Row], tested: Sequence[Row], calibration: Calibration
) -> float | None:
    """Mean error of a constant MFU: the geometric mean over the fitted cells of the same sources
    and clusters, or else of the same sources, or else of the same GPU generations.  None where
    there is no such cell or the metric is not the speed."""
    if group.metric != SPEED:
        return None
    fitted = [r for r in rows if is_scored(r) and split_of(r, group, calibration) == "fitted"]
    sources, clusters = ({test[key] for test in tested} for key in ("source", "cluster"))
    own = [row for row in fitted if row["source"] in sources]
    same = [row for row in own if row["cluster"] in clusters]
    generations = {_generation(test) for test in tested}
    alike = [row for row in fitted if _generation(row) in generations]
    base = _mfus(same or own or alike)
    published = _mfus(tested)
    if not base or not published:
        return None
    constant = statistics.geometric_mean(base)
    return statistics.fmean(abs(constant / value - 1.0) for value in published)


def _mfus(rows: Sequence[Row]) -> list[float]:
    """The MFU at each published speed, from the predicted MFU and speed of the row."""
    keys = (SPEED, "pred_mfu_causal", f"pred_{SPEED}")
    cells = ([number(row, key) for key in keys] for row in rows)
    return [speed * (mfu / made) for speed, mfu, made in cells if speed and mfu and made]


def _generation(row: Row) -> str:
    try:
        return load_cluster(row["cluster"]).generation
    except ConfigError:
        return ""


def verdicts(rows: Sequence[Row]) -> Verdicts:
    """The confusion matrix of published and predicted verdicts over all scored rows."""
    counts: dict[tuple[str, str], int] = {}
    headroom: dict[tuple[str, str], tuple[float, ...]] = {}
    tight = 0
    for row in rows:
        if not is_scored(row):
            continue
        cell = (str(row["status"]), str(row["pred_status"]))
        counts[cell] = counts.get(cell, 0) + 1
        left, total = number(row, "pred_headroom_bytes"), number(row, "pred_device_total_bytes")
        if left is not None and total is not None:
            headroom[cell] = (*headroom.get(cell, ()), left)
            tight += fits_word(left, left + total) == "tight"
    return Verdicts(tight=tight, counts=counts, headroom_bytes=headroom)


def left_out_errors(
    rows: Sequence[Row], accuracy: Accuracy, calibration: Calibration
) -> dict[str, float]:
    """The mean absolute error of each group of speeds, predicted with constants that were fitted
    without the group's source (the shipped constants if none was fitted to it). Cells to which the
    shipped constants were fitted do not count; groups without other cells are left out."""
    found: dict[str, float] = {}
    for group in accuracy.groups:
        if group.metric != SPEED:
            continue
        cells = [
            row for row in members(group, rows) if split_of(row, group, calibration) != "fitted"
        ]
        errors: list[Any] = errors_of(group.metric, cells)
        if errors:
            found[group.name] = statistics.fmean(abs(error) for error in errors)
    return found
