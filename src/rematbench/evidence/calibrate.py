"""Calibration on published rows: the simulator as the step model of `cost.fit`, and refits that
leave one source out.

Every row is planned and lowered once per worker, with the constants that the fit starts from; only
the durations of its actions change from trial to trial.
"""

import math
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.program import Program
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evidence.accuracy import Accuracy
from rematbench.evidence.fit import (
    PRIORS,
    Concerns,
    FitReport,
    PredictAll,
    StepFit,
    fit,
    fit_rows,
    value_of,
    with_values,
)
from rematbench.evidence.job_evidence import (
    LATE_STEP,
    OTHER_GENERATION,
    PEAK,
    REFITTED,
    SHEETS,
    SHIPPED,
    line_of,
    slope_column,
)
from rematbench.evidence.peaks import trained_by
from rematbench.evidence.predict import predict_rows, run_case
from rematbench.evidence.published.row_cases import PublishedCase, read_case
from rematbench.evidence.published.sheets import (
    SPEED,
    Cell,
    Quantity,
    Row,
    RowError,
    is_scored,
    number,
    printed_bytes,
)
from rematbench.evidence.published.words import committed, sheets
from rematbench.host.table import grouped
from rematbench.host.workers import collect_rarely
from rematbench.inputs.constants import Calibration, is_fit
from rematbench.inputs.load import load_cluster, load_system
from rematbench.plugins.discover import discover

WARM, LONG = 2, 3
"""Numbers of rounds of pp micro-batches.  After WARM rounds a 1F1B schedule is periodic.  So the
seconds of a long step are those of LONG rounds plus, for each further micro-batch, the mean
increase per micro-batch between WARM and LONG rounds."""


@contextmanager
def step_model(calibration: Calibration, processes: int = 2) -> Iterator[PredictAll]:
    """A function that predicts the step seconds of (FIT row, trial constants) pairs in `processes`
    workers.  All trials of a row go to one worker, which lowers the row once."""

    def predict_all(jobs: Sequence[tuple[Row, Calibration]]) -> list[float]:
        of_row = grouped((id(row), index) for index, (row, _) in enumerate(jobs))
        work = [(dict(jobs[group[0]][0]), [jobs[i][1] for i in group]) for group in of_row.values()]
        found = [0.0] * len(jobs)
        for group, values in zip(of_row.values(), pool.map(_trials, work), strict=True):
            for index, value in zip(group, values, strict=True):
                found[index] = value
        return found

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start, (calibration,)) as pool:
        yield predict_all


# -- a worker ---------------------------------------------------------------------------------


class _Lowered(msgspec.Struct, frozen=True):
    """A lowered row: (case, program) for one or for two numbers of micro-batches.  `beyond`: how
    many micro-batches the row has beyond the larger number, divided by the difference of the two
    numbers."""

    parts: tuple[tuple[PublishedCase, Program], ...]
    beyond: float


_START: list[Calibration] = []
_LOWERED: dict[bytes, _Lowered] = {}


def _start(calibration: Calibration) -> None:
    collect_rarely()
    _START[:] = [calibration]


def _trials(work: tuple[Row, list[Calibration]]) -> list[float]:
    row, trials = work
    case = read_case(row, discover())
    if case.key not in _LOWERED:
        _LOWERED[case.key] = _lowered(case, _START[0])
    return [_seconds(_LOWERED[case.key], trial) for trial in trials]


def _lowered(case: PublishedCase, calibration: Calibration) -> _Lowered:
    """A row planned with the starting constants and lowered: the whole step, or, for a long step
    without interleaving, steps of WARM and of LONG rounds.  ValueError if it has no plan."""
    problem = case.problem(calibration)
    outcome = run_case(case, problem, discover())
    if outcome.plan is None:
        raise ValueError(f"a FIT row cannot be planned: {outcome.status}: {outcome.reason}")
    lay, plan = problem.layout, outcome.plan
    if lay.vpp > 1 or lay.num_micro_batches <= LONG * lay.pp:
        return _Lowered(((case, lower(plan, problem)),), 0.0)
    of_round = lay.pp * lay.micro_batch * lay.dp
    shorter = [case.changed(global_batch=rounds * of_round) for rounds in (WARM, LONG)]
    short = [(each, lower(plan, each.problem(calibration))) for each in shorter]
    rest = lay.num_micro_batches - LONG * lay.pp
    return _Lowered(tuple(short), rest / ((LONG - WARM) * lay.pp))


SCALES = ("kernels", "attention", "communication", "host")
MORE = 1.1
SLOW_HOST = 4.0
"""The host scale of the second tangent: near three standard deviations of the prior of
`host_launch_s`."""


def tangents(row: Row, calibration: Calibration) -> dict[str, float]:
    """The columns of a row's two tangents of ln(step seconds) in the log scales: the slopes at the
    scales of the row's stack, and the slopes and the step with a host SLOW_HOST times as slow."""
    lowered = _lowered(read_case(row, discover()), calibration)
    late = _scaled(lowered, "host", SLOW_HOST)
    step = math.log(_seconds(late, calibration) / _seconds(lowered, calibration))
    near = {slope_column(k): v for k, v in _slopes(lowered, calibration).items()}
    far = {slope_column(k, late=True): v for k, v in _slopes(late, calibration).items()}
    return near | far | {LATE_STEP: step}


def _slopes(lowered: _Lowered, calibration: Calibration) -> dict[str, float]:
    """d ln(step seconds) / d ln(scale) for each of SCALES, as the finite difference of the factor
    MORE."""
    base_s = _seconds(lowered, calibration)
    more_s = {name: _seconds(_scaled(lowered, name, MORE), calibration) for name in SCALES}
    return {name: math.log(more_s[name] / base_s) / math.log(MORE) for name in SCALES}


def _scaled(lowered: _Lowered, name: str, factor: float) -> _Lowered:
    parts = []
    for case, program in lowered.parts:
        scales = case.system.scales
        scales = replace(scales, **{name: factor * getattr(scales, name)})
        parts.append((replace(case, system=replace(case.system, scales=scales)), program))
    return replace(lowered, parts=tuple(parts))


def _seconds(lowered: _Lowered, calibration: Calibration) -> float:
    pairs = ((case.problem(calibration), program) for case, program in lowered.parts)
    times = [simulate_chunks(p, action_seconds(problem, p)).step_s for problem, p in pairs]
    return times[-1] + lowered.beyond * (times[-1] - times[0])


# -- fits -------------------------------------------------------------------------------------


def calibrate(rows: Sequence[Row], start: Calibration, processes: int = 2) -> FitReport:
    """The constants fitted to the FIT rows, from `start`.  The rows are planned with `start`."""
    with step_model(start, processes) as model:
        return fit(rows, start, model, concerns(start))


def concerns(calibration: Calibration) -> Concerns:
    """A function that says whether a constant belongs to a row's GPU generation, network or stack,
    so that changing the constant may change the row's step."""

    def concerned(name: str, row: Row) -> bool:
        cluster, system = load_cluster(row["cluster"]), load_system(row["system"])
        entries = {
            ("gpus", cluster.generation),
            ("networks", calibration.network_entry(cluster.constants)),
            ("systems", calibration.system_entry(system.constants)),
        }
        return tuple(name.split(".")[:2]) in entries

    return concerned


def without_source(calibration: Calibration, rows: Sequence[Row], source: str) -> Calibration:
    """The starting calibration for a fit without `source`.  The source's FIT sweeps are removed.
    Constants of generations, networks and stacks that only the source covers are reset to the
    centres of their priors."""
    kept = tuple(rule for rule in calibration.fit if source not in rule.source)
    left = fit_rows(rows, kept)
    seen = {("networks", row["cluster"]) for row in left}
    seen |= {("systems", row["system"]) for row in left}
    seen |= {("gpus", load_cluster(row["cluster"]).generation) for row in left}
    lost = [name for name in calibration.fitted if tuple(name.split(".")[:2]) not in seen]
    centres = [PRIORS[name.rsplit(".", 1)[1]].centre for name in lost]
    return replace(with_values(calibration, lost, centres), fit=kept)


def leave_one_out(
    sheets: Mapping[str, Sequence[Row]],
    calibration: Calibration,
    accuracy: Accuracy,
    processes: int = 2,
) -> list[Cell]:
    """The lines of config/left_out.csv.  A cell whose source is in the accuracy groups is predicted
    with constants fitted to the other sources only.  No constant was fitted to the sources of the
    remaining cells; the shipped constants predict these cells."""
    places = [(name, index) for name in SHEETS for index in range(len(sheets[name]))]
    rows = [sheets[name][index] for name, index in places]
    made: dict[int, tuple[str, dict[str, Any], Calibration]] = {}
    for source, scored, constants in left_out_rows(rows, calibration, sources(accuracy), processes):
        own = [at for at, row in enumerate(rows) if source in row["source"]]
        made |= {at: (REFITTED, row, constants) for at, row in zip(own, scored, strict=True)}
    rest = [at for at in range(len(rows)) if at not in made]
    plain = predict_rows([rows[at] for at in rest], processes=processes, constants=calibration)
    made |= {at: (SHIPPED, row, calibration) for at, row in zip(rest, plain, strict=True)}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, collect_rarely) as pool:
        work = [(*made[at][1:], calibration) for at in range(len(rows))]
        sloped = pool.map(_sloped, work, chunksize=8)
    lines = zip(places, sloped, strict=True)
    found = [
        line_of(name, index, sheets[name][index], row, made[at][0])
        for at, ((name, index), row) in enumerate(lines)
    ]
    return [line for line in found if line]


def _sloped(work: tuple[dict[str, Any], Calibration, Calibration]) -> dict[str, Any]:
    """A predicted row; if it has a speed, with its tangents and its speed on the other generation.
    The tangents are taken under the constants that predicted the row, because other constants can
    have another critical path; the other generation's are the shipped ones, which saw no row of
    this generation."""
    row, constants, shipped = work
    if row["status"] != "ok" or not (row[SPEED] and row[f"pred_{SPEED}"]):
        return row
    return {**row, **tangents(row, constants), OTHER_GENERATION: on_other_generation(row, shipped)}


def on_other_generation(row: Row, calibration: Calibration) -> float | None:
    """A row's tokens/s/GPU with the constants and kernels of the other generation that is fitted to
    steps (of several, the first by name), on a GPU of the row's FLOP/s and bytes/s.  None if the
    row's kernels have no rates there."""
    case, cluster = read_case(row, discover()), load_cluster(row["cluster"])
    fitted = {name.split(".")[1] for name in calibration.fitted if name.startswith("gpus.")}
    other = min(fitted - {cluster.generation})
    there = replace(case, cluster=replace(cluster, generation=other))
    try:
        result = run_case(there, there.problem(calibration), discover())
    except RowError:
        return None
    return result.tokens_per_s_per_gpu


def sources(accuracy: Accuracy) -> list[str]:
    """The sources of the accuracy groups whose metric is the speed, in the sheets of steps."""
    groups = [g for g in accuracy.groups if g.metric == SPEED and g.sheet in SHEETS]
    return list(dict.fromkeys(group.rule.source for group in groups))


def left_out_rows(
    rows: Sequence[Row], calibration: Calibration, sources: Sequence[str], processes: int = 2
) -> Iterator[tuple[str, list[dict[str, Any]], Calibration]]:
    """For every source: its name, its rows predicted with constants fitted without the source, and
    these constants.

    The programs and the slopes of the step model are computed once, with `calibration`; the errors
    of every trial are simulated.
    """
    with step_model(calibration, processes) as model:
        fitted = fit_rows(rows, calibration.fit)
        step_fit = StepFit(fitted, calibration, model, concerns(calibration))
        slopes = step_fit.slopes(calibration)
        for source in sources:
            start = without_source(calibration, rows, source)
            kept = [i for i, row in enumerate(step_fit.rows) if is_fit(row, start.fit)]
            constants = step_fit.solved(start, kept, slopes)
            own = [row for row in rows if source in row["source"]]
            yield source, predict_rows(own, processes=processes, constants=constants), constants


def moved(before: Calibration, after: Calibration) -> list[tuple[str, float, float]]:
    """(name, value before, value after) of every fitted constant."""
    return [(name, value_of(before, name), value_of(after, name)) for name in before.fitted]


NO_BYTES = ("offloaded_states.csv",)
"""Sheets whose sources do not explain a part of the bytes that they print."""
TWICE = "fms-acceleration, full"
"""A source of runs_more.csv whose rows are also in adapters.csv."""
PREDICTED: dict[Quantity, str] = {
    "allocated": f"pred_{PEAK}",
    "reserved": "pred_reserved_bytes",
    "device": "pred_device_total_bytes",
}


def left_out_bytes(processes: int = 2) -> list[Cell]:
    """The lines of config/left_out_bytes.csv: the bytes of each quantity that a row prints, and
    the predicted bytes.  No row needs a refit, because no constant of these bytes is fitted."""
    rows = [
        row
        for name in sheets()
        if name not in NO_BYTES
        for row in committed(name)
        if row.get("status") == "ok" and printed_bytes(row) and is_scored(row)
    ]
    told = [row for row in rows if not row["source"].startswith(TWICE)]
    lines = []
    for row in predict_rows(told, processes=processes):
        for quantity, nbytes in printed_bytes(row).items():
            if made := number(row, PREDICTED[quantity]):
                place = {key: row[key] for key in ("sheet", "row", "source")}
                place |= {"trains": trained_by(row.get("method") in (None, "", "full"))}
                sizes = {"bytes": f"{nbytes:.6g}", "pred_bytes": f"{made:.6g}"}
                lines.append({**place, "quantity": quantity, **sizes})
    return lines
