"""Trace the points of a baseline, and compare traced bytes with predicted and published bytes."""

from pathlib import Path
from typing import Any

from msgspec import field
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import program_bytes
from rematbench.evaluate.problems import make_problem
from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.configfile import ConfigError, convert, read_mapping
from rematbench.inputs.job import Job, degrees
from rematbench.inputs.layout import Layout
from rematbench.inputs.paths import data_dir
from rematbench.plan import Unsupported
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.workload import NonNegativeInt
from rematbench.worlds.packages.process import job, policy, run_jobs
from rematbench.worlds.packages.stack import (
    EMPTY_STACK,
    StackProblem,
    activation_peak,
    package_problem,
)
from rematbench.worlds.records.record import Record, keep_record, read_record


class Point(Job, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One traced run of rank 0: a problem, a policy's settings, and its published value.

    The published value is a `cell` of runs.csv (table, model, recompute, offload fraction) or a
    `claim`. A claim is the longest sequence in tokens, given by the row's id in claims.csv and the
    position among the row's values.
    """

    name: str
    model: str
    cluster: str
    system: str
    settings: dict[str, Any] = field(default_factory=dict)
    baseline: str = "megatron_core"
    cell: tuple[Any, ...] = ()
    claim: tuple[str, NonNegativeInt] | None = None

    @property
    def problem(self) -> Problem:
        return make_problem(self)

    @property
    def words(self) -> str:
        """The settings of the policy as KEY=VALUE words; `none` if there are no settings."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items()) or "none"


def load_points() -> tuple[Point, ...]:
    """The shipped points; ConfigError, naming the path, if their file is invalid."""
    path = data_dir("config") / "baseline_points.yaml"
    listed = read_mapping(path, str(path))["points"]
    return tuple(_point(values, f"{path}: points: {i}") for i, values in enumerate(listed))


def _point(values: dict[str, Any], label: str) -> Point:
    others = {key: value for key, value in values.items() if key != "layout"}
    layout = convert(values["layout"], Layout, label)
    return convert({**degrees(layout), **others}, Point, label)


def trace_points(points: tuple[Point, ...], folder: Path) -> list[Record]:
    """Trace points and return their records.  Each record is written to `folder`/<name>.json when
    its trace ends; an unchanged record keeps the date in the file."""
    found = []
    for point in points:
        (record,) = run_jobs(
            point.baseline, [job(point.problem, _method(point), "traced", timeout_s=600.0)]
        )
        keep_record(record, folder, point.name)
        found.append(record)
    return found


def _method(point: Point) -> Composition:
    return policy(point.baseline, point.settings)


def rows(points: tuple[Point, ...], folder: Path) -> list[dict[str, Any]]:
    """A row for each point with a record in `folder`: traced, predicted and published bytes.

    Predictions use the plan that the baseline's plan.py makes from the policy.
    `known_extra_bytes`: bytes at the peak that the package's stack keeps beyond the operator table.
    `unexplained`: (traced - known extra) / predicted - 1.  `freed_against_none`: share of traced
    activation bytes that the policy frees, compared with the same engine, model and layout without
    settings.
    """
    there = tuple(point for point in points if (folder / f"{point.name}.json").exists())
    lines = [_row(point, read_record(folder / f"{point.name}.json")) for point in there]
    _freed(lines, there)
    return lines


def _row(point: Point, record: Record) -> dict[str, Any]:
    seen, engine = record.measured, record.engine
    row: dict[str, Any] = {"point": point.name, "policy": point.words, "status": record.status}
    predicted = row["predicted_peak_bytes"] = peak_bytes(point)
    row["published_peak_bytes"] = published(point)
    if seen is not None and engine is not None:
        (rank,) = seen.ranks
        row["traced_activation_bytes"] = rank.activation_peak_bytes
        row["traced_host_bytes"] = rank.host_bytes
        traced = row["traced_peak_bytes"] = rank.peak_bytes
        kernels = (f"{name}: {kernel}" for name, kernel in engine.kernels.items())
        row["kernel_stack"] = "; ".join((engine.label, *kernels))
        own = peak_bytes(point, with_stack=True)
        if isinstance(predicted, int) and isinstance(own, int):
            extra = row["known_extra_bytes"] = own - predicted
            row["unexplained"] = (traced - extra) / predicted - 1
    return row


def _freed(lines: list[dict[str, Any]], points: tuple[Point, ...]) -> None:
    """Add `freed_against_none` to the rows: a policy's gain is over the same engine with the same
    model, layout and sequence length, never over another engine."""
    whole = {_where(p): r for p, r in zip(points, lines, strict=True) if not p.settings}
    for point, row in zip(points, lines, strict=True):
        none = whole.get(_where(point), {}).get("traced_activation_bytes")
        if point.settings and none and "traced_activation_bytes" in row:
            row["freed_against_none"] = 1 - row["traced_activation_bytes"] / none


def _where(point: Point) -> tuple[Any, ...]:
    return point.baseline, point.model, point.layout, point.stack.attention, point.work.seq_len


def peak_bytes(point: Point, *, with_stack: bool = False) -> int | str:
    """Predicted peak device bytes of the first stage under the plan of the baseline's plan.py, on
    the point's system; `with_stack` adds the tensors of the package's stack; `unsupported` if there
    is no plan."""
    method = _method(point)
    if with_stack:
        problem = package_problem(method, point.problem)
    else:
        problem = EMPTY_STACK.problem(point.problem)
    plan = method.plan(problem)
    if isinstance(plan, Unsupported):
        return "unsupported"
    program = lower(plan, problem)
    found = program_bytes(problem, plan, program)[0]
    if with_stack and isinstance(problem, StackProblem):
        peak = activation_peak(method.methods[0], problem, program.ranks[0], found)
        found = replace(found, activation_peak=peak)
    return found.device_peak


def published(point: Point) -> int | str:
    """The published value of a point. For a cell: its peak device bytes, or its status if it has no
    peak. For a claim: whether the point's sequence length fits. Otherwise empty. ConfigError for a
    cell or claim that is not published."""
    if point.claim is not None:
        longest = _longest(point, *point.claim)
        return "fits" if point.work.seq_len <= longest else "does not fit"
    if not point.cell:
        return ""
    table, model, recompute, share = point.cell
    for row in read_sheet(data_dir("published") / "runs.csv"):
        same = (row["table"], row["model"], row["recompute"]) == (table, model, recompute)
        if same and float(row["offload_fraction"] or 0) == share and row["tp"]:
            bytes_text = row["peak_device_bytes"]
            return int(bytes_text) if bytes_text else row["status"]
    raise ConfigError("baseline_points.yaml", point.name, f"no published cell {point.cell}")


def _longest(point: Point, claim: str, part: int) -> int:
    """The longest sequence of a claim in tokens; `part` is the position among its values."""
    for row in read_sheet(data_dir("published") / "claims.csv"):
        values = row["value"].split(" / ")
        if row["id"] == claim and part < len(values) and values[part].isdigit():
            return int(values[part])
    raise ConfigError("baseline_points.yaml", point.name, f"{claim} has no length at index {part}")
