"""Traced points of a baseline: run them; their bytes beside predicted and published ones."""

import csv
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from rematbench.baselines import Job, job, policy, run_jobs
from rematbench.configfile import ConfigError
from rematbench.evaluate import PlanEvaluation
from rematbench.layout import Layout
from rematbench.paths import data_dir
from rematbench.plan import Unsupported
from rematbench.problem import AttentionKind, Problem
from rematbench.record import Record, read_record, write_record
from rematbench.suite import make_problem
from rematbench.workload import Precision

COLUMNS = (
    *("point", "policy", "status", "traced_peak_bytes", "predicted_peak_bytes"),
    *("published_peak_bytes", "traced_activation_bytes", "traced_host_bytes", "shim"),
)


class Point(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One traced run: a problem, a policy's settings, a rank, and the published cell beside it."""

    name: str
    model: str
    cluster: str
    system: str
    layout: Layout
    seq_len: int
    attention: AttentionKind = "flash"
    precision: Precision = "bf16"
    settings: dict[str, Any] = {}
    baseline: str = "megatron_core"
    rank: int = 0
    cell: tuple[Any, ...] = ()

    @property
    def problem(self) -> Problem:
        """The problem."""
        return make_problem(
            model=self.model,
            cluster=self.cluster,
            system=self.system,
            layout=self.layout,
            seq_len=self.seq_len,
            precision=self.precision,
            attention=self.attention,
        )

    @property
    def words(self) -> str:
        """The policy in a few words."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items()) or "none"


class Points(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of points."""

    source: str
    points: tuple[Point, ...]


def load_points(path: Path | None = None) -> tuple[Point, ...]:
    """The shipped points, or a file's; ConfigError with its path for anything else."""
    path = path or data_dir("config") / "baseline_points.yaml"
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), Points).points
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(str(path), "", str(error)) from error


def trace_points(points: tuple[Point, ...], folder: Path, timeout_s: float = 600.0) -> list[Record]:
    """Trace points, writing each record as soon as it is there (`folder`/<name>.json)."""
    found = []
    for point in points:
        (record,) = run_jobs(point.baseline, [_job(point, timeout_s)])
        write_record(record, folder / f"{point.name}.json")
        found.append(record)
    return found


def _job(point: Point, timeout_s: float) -> Job:
    method = policy(point.baseline, point.settings)
    return job(point.problem, method, "traced", rank=point.rank, timeout_s=timeout_s)


def rows(points: tuple[Point, ...], folder: Path) -> list[dict[str, Any]]:
    """One row per point with a record: traced, predicted by our plan of the policy, published."""
    found = []
    for point in points:
        path = folder / f"{point.name}.json"
        if path.exists():
            found.append(_row(point, read_record(path)))
    return found


def _row(point: Point, record: Record) -> dict[str, Any]:
    seen = record.observed
    row: dict[str, Any] = {"point": point.name, "policy": point.words, "status": record.status}
    if seen is not None:
        row["traced_activation_bytes"] = seen.activation_peak_bytes[0]
        row["traced_host_bytes"] = seen.host_peak_bytes[0]
        row["traced_peak_bytes"] = seen.activation_peak_bytes[0] + seen.state_bytes[0]
        row["shim"] = "+".join(seen.shim)
    row["predicted_peak_bytes"] = predicted(point)
    row["published_peak_bytes"] = published(point)
    return {column: row.get(column, "") for column in COLUMNS}


def predicted(point: Point) -> int | str:
    """The simulator's peak of the traced rank's stage under the baseline's plan.py."""
    problem = point.problem
    method = policy(point.baseline, point.settings)
    plan = method.plan(problem)
    if isinstance(plan, Unsupported):
        return "unsupported"
    found = problem.cost.evaluate(plan)
    assert isinstance(found, PlanEvaluation)
    stage = point.rank // (point.layout.tp * point.layout.cp * point.layout.dp)
    return found.peak_device_bytes[stage]


def published(point: Point) -> int | str:
    """The cell's bytes, or `oom`; empty if there is none."""
    if not point.cell:
        return ""
    table, model, recompute, share = point.cell
    with (data_dir("published") / "runs.csv").open() as lines:
        for row in csv.DictReader(lines):
            same = (row["table"], row["model"], row["recompute"]) == (table, model, recompute)
            if same and float(row["offload_fraction"] or 0) == share and row["tp"]:
                bytes_text = row["peak_device_bytes"]
                return int(bytes_text) if bytes_text else row["status"]
    raise ConfigError("baseline_points.yaml", point.name, f"no published cell {point.cell}")
