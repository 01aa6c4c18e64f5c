"""Predictions of the steps of `measure-gpu`'s part `layers`, written before the measurement.

A measurement refuses predictions by other constants or of other plans.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rematbench.engine.program.program import without_neighbours
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.evaluation import fullest_rank
from rematbench.evaluate.evaluator import SINGLE_EVALUATOR, replayed
from rematbench.evaluate.result import evaluate_plan
from rematbench.host.console import CommandError
from rematbench.host.memory import free_bytes
from rematbench.measure.layer_suite import HandCell
from rematbench.measure.records import Prediction, Searched, append_line, read_lines
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.registry import IDENTITY
from rematbench.worlds.records.digests import code_digest
from rematbench.worlds.records.record import plan_hash, provenance, run_spec
from rematbench.worlds.records.suite_cells import Cell, problem_of

PREDICTED = "predictions.jsonl"
PREDICTIONS = {"layers": PREDICTED, "searched": "searched.jsonl"}
"""The file of predictions of each part that takes turns."""


def predict(cell: Cell) -> Prediction:
    """Return the prediction of a cell: the simulated seconds, and the bytes of the fullest rank. In
    a pipeline only the first rank is predicted."""
    known: dict[str, Any] = {**identity(cell), "code": code_digest("simulated")}
    known |= {"cell": cell.name, "provenance": provenance(cell.problem.calibration)}
    if isinstance(cell.plan, Unsupported):
        return Prediction(status="unsupported", reason=cell.plan.reason, **known)
    result, lowered = (
        evaluate_plan(cell.problem, cell.plan),
        SINGLE_EVALUATOR.lowered(cell.problem, cell.plan),
    )
    step_s, number = result.step_s, fullest_rank(lowered.ranks)
    if cell.problem.layout.pp > 1:  # the first rank runs alone
        number, alone = 0, without_neighbours(lowered.program)
        step_s = simulate_chunks(alone, action_seconds(cell.problem, alone)).step_s
    rank = lowered.ranks[number]
    # The runtime leaves all addresses to torch's allocator, so every plan needs the reserved bytes.
    reserved = replayed(lowered.program, number, rank)
    return Prediction(
        status=result.status,
        reason=result.reason,
        step_s=step_s if result.fits else None,
        allocated_bytes=rank.device_peak,
        reserved_bytes=reserved.reserved_bytes,
        pinned_bytes=rank.host_peak,
        host_bytes=rank.host_state + rank.host_activation_peak,
        **known,
    )


def identity(cell: Cell) -> dict[str, str]:
    """Return the digests that a line has if it belongs to this cell and its present plan."""
    planned = ""
    if isinstance(cell.plan, Plan) and not isinstance(cell, HandCell):
        planned = plan_hash(cell.problem, cell.plan)
    return {"run_id": run_spec(cell.problem, cell.method).run_id, "plan_hash": planned}


def write_predictions(lines: Sequence[Prediction], path: Path, *, anew: bool) -> str:
    """Write predictions and return a line for the user. The file stays as it is if its predictions
    are equal. CommandError if they differ, unless `anew`."""
    if path.exists() and not anew:
        old = {line.cell: line for line in lines_of(path)}
        same = {
            line.cell: _with_old_provenance(line, old[line.cell])
            for line in lines
            if line.cell in old
        }
        changed = [line.cell for line in lines if same.get(line.cell) != old.get(line.cell)]
        if changed or old.keys() - same.keys():
            first = (changed or sorted(old.keys() - same.keys()))[0]
            raise CommandError(
                f"{path}: the prediction of {first} changed or is gone; --anew replaces the file"
            )
        return f"{path}: unchanged, {len(old)} predictions"
    path.unlink(missing_ok=True)
    for line in lines:
        append_line(path, line)
    return f"{path}: {len(lines)} predictions"


def lines_of(path: Path) -> Sequence[Prediction]:
    """The predictions of a file, as lines of its part; CommandError if the file is missing."""
    searched = path.name == PREDICTIONS["searched"]
    if not path.exists():
        command = f"rematbench measure-gpu --predict{' --part searched' if searched else ''}"
        raise CommandError(f"{path}: no predictions; first run `{command}`")
    return read_lines(path, Searched if searched else Prediction)


def _with_old_provenance(line: Prediction, old: Prediction) -> Prediction:
    """The prediction with the provenance of `old`, and with its seconds if only rounding differs,
    because sums in another order do not change a prediction."""
    step_s = line.step_s
    if step_s and old.step_s and math.isclose(step_s, old.step_s, rel_tol=1e-9):
        step_s = old.step_s
    return replace(line, provenance=old.provenance, code=old.code, step_s=step_s)


def read_predictions(path: Path, cells: Iterable[Cell]) -> dict[str, Prediction]:
    """Read the predictions of a file, by cell. CommandError if a cell has no prediction by the
    present constants and plans."""
    known: dict[str, Prediction] = {line.cell: line for line in lines_of(path)}
    for cell in cells:
        if isinstance(cell, HandCell):
            continue
        line = known.get(cell.name)
        if line is None:
            raise CommandError(f"{path} has no prediction for {cell.name}")
        if {"run_id": line.run_id, "plan_hash": line.plan_hash} != identity(cell):
            raise CommandError(f"{path}: {cell.name} was predicted with other constants or plans")
    return known


def stands_for(cell: Cell) -> str:
    """The name of the cell whose prediction decides whether this cell can start. For a step written
    by hand it is keep_all, or full recomputation if layers are checkpointed; for others the cell
    itself."""
    if not isinstance(cell, HandCell):
        return cell.name
    method = IDENTITY if cell.means in ("nothing", "save_on_cpu") else "full_recompute"
    return f"{problem_of(cell.name)}.{method}.0"


def refusal(line: Prediction, cell: Cell) -> str:
    """The reason why a cell is not started: its prediction does not fit, or too little host memory
    is free (save_on_cpu needs the device bytes of keep_all). Empty if it can start."""
    pinned = max(line.host_bytes, line.pinned_bytes)
    if isinstance(cell, HandCell) and cell.means == "save_on_cpu":
        pinned = line.allocated_bytes
    elif line.status != "ok":
        return f"predicted {line.status}: {line.reason}"
    free = free_bytes()
    if pinned > free >= 0:
        return f"pins {pinned / 2**30:.0f} GiB, but the host has {free / 2**30:.0f} GiB free"
    return ""
