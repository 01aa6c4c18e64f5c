"""Traced points of a baseline: run them; their bytes beside predicted and published ones."""

from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from rematbench.choose.outcome import make_problem
from rematbench.lowering.lower import lower
from rematbench.packages.process import Job, job, policy, run_jobs
from rematbench.packages.stack import StackProblem, activation_peak, packaged
from rematbench.plan import Unsupported
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.published.sheets import read_sheet
from rematbench.runs.record import Record, keep_record, read_record
from rematbench.simulate.evaluate import program_bytes
from rematbench.spec.configfile import ConfigError, convert, read_mapping
from rematbench.spec.layout import Layout
from rematbench.spec.paths import data_dir
from rematbench.spec.problemspec import ProblemSpec, degrees
from rematbench.workload import NonNegativeInt


class Point(ProblemSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One traced run: a problem, a policy's settings, a rank, and what is published beside it.

    That is a `cell` of runs.csv, or a `claim`: the longest sequence in tokens, as the row's id in
    claims.csv and which of its values.
    """

    name: str
    model: str
    cluster: str
    system: str
    settings: dict[str, Any] = field(default_factory=dict)
    baseline: str = "megatron_core"
    rank: int = 0
    cell: tuple[Any, ...] = ()
    claim: tuple[str, NonNegativeInt] | None = None

    @property
    def problem(self) -> Problem:
        """The problem."""
        return make_problem(self)

    @property
    def words(self) -> str:
        """The policy in a few words."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items()) or "none"


class Points(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of points; each gives its `layout` whole."""

    source: str
    points: tuple[dict[str, Any], ...]


class _Whole(Struct, frozen=True):
    layout: Layout


def load_points(path: Path | None = None) -> tuple[Point, ...]:
    """The shipped points, or a file's; ConfigError with its path for anything else."""
    path = path or data_dir("config") / "baseline_points.yaml"
    listed = convert(read_mapping(path, str(path)), Points, str(path)).points
    return tuple(_point(values, f"{path}: points: {i}") for i, values in enumerate(listed))


def _point(values: dict[str, Any], label: str) -> Point:
    others = {key: value for key, value in values.items() if key != "layout"}
    layout = convert({"layout": values.get("layout")}, _Whole, label).layout
    return convert({**degrees(layout), **others}, Point, label)


def trace_points(points: tuple[Point, ...], folder: Path, timeout_s: float = 600.0) -> list[Record]:
    """Trace points, writing each record as soon as it is there (`folder`/<name>.json); one that
    says the same as before keeps its date."""
    found = []
    for point in points:
        (record,) = run_jobs(point.baseline, [_job(point, timeout_s)])
        keep_record(record, folder, point.name)
        found.append(record)
    return found


def _job(point: Point, timeout_s: float) -> Job:
    return job(point.problem, _method(point), "traced", rank=point.rank, timeout_s=timeout_s)


def _method(point: Point) -> Composition:
    return policy(point.baseline, point.settings)


def rows(points: tuple[Point, ...], folder: Path) -> list[dict[str, Any]]:
    """One row per point with a record: traced, predicted by our plan of the policy, published.

    `known_extra_bytes`: what the traced stack keeps beside the operator table, at the peak.
    `unexplained`: traced less known extra over predicted, less 1.  `freed_against_none`: share of
    the activations of the same engine, model and layout without a policy.
    """
    there = tuple(point for point in points if (folder / f"{point.name}.json").exists())
    found = [_row(point, read_record(folder / f"{point.name}.json")) for point in there]
    _freed(found, there)
    return found


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
        own = peak_bytes(point, own=True)
        if isinstance(predicted, int) and isinstance(own, int):
            extra = row["known_extra_bytes"] = own - predicted
            row["unexplained"] = (traced - extra) / predicted - 1
    return row


def _freed(found: list[dict[str, Any]], points: tuple[Point, ...]) -> None:
    """A gain is against the same engine on the same model and layout, never another engine."""
    whole = {_where(p): r for p, r in zip(points, found, strict=True) if not p.settings}
    for point, row in zip(points, found, strict=True):
        none = whole.get(_where(point), {}).get("traced_activation_bytes")
        if point.settings and none and "traced_activation_bytes" in row:
            row["freed_against_none"] = 1 - row["traced_activation_bytes"] / none


def _where(point: Point) -> tuple[Any, ...]:
    return point.baseline, point.model, point.layout, point.attention, point.seq_len


def peak_bytes(point: Point, *, own: bool = False) -> int | str:
    """Device bytes at the peak of the traced rank's stage under the baseline's plan.py: on the
    point's system, or as the package itself holds them (`own`)."""
    method = _method(point)
    problem = packaged(method, point.problem) if own else point.problem
    plan = method.plan(problem)
    if isinstance(plan, Unsupported):
        return "unsupported"
    program = lower(plan, problem)
    stage = point.rank // (point.layout.tp * point.layout.cp * point.layout.dp)
    found = program_bytes(problem, plan, program)[stage]
    if isinstance(problem, StackProblem):
        peak = activation_peak(method.methods[0], problem, program.ranks[stage], found)
        found = replace(found, activation_peak=peak)
    return found.device_peak


def published(point: Point) -> int | str:
    """The cell's bytes or `oom`; of a claim whether this length is said to fit; else empty."""
    if point.claim is not None:
        longest = _longest(point, *point.claim)
        return "fits" if point.seq_len <= longest else "does not fit"
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
    """Tokens of the longest sequence by a claim."""
    for row in read_sheet(data_dir("published") / "claims.csv"):
        values = row["value"].split(" / ")
        if row["id"] == claim and part < len(values) and values[part].isdigit():
            return int(values[part])
    raise ConfigError("baseline_points.yaml", point.name, f"no published length {claim}, {part}")
