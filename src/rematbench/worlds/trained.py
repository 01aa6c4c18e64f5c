"""Long training runs on real text, in the executed world: which cells have a loss curve, and the
runs."""

from collections.abc import Sequence
from typing import Any

from rematbench.engine.lowering.lower import lower
from rematbench.host.ranks import record_status
from rematbench.plan import Plan
from rematbench.plugins.registry import IDENTITY
from rematbench.worlds.records.measured import LEARNING_RATE, Measured
from rematbench.worlds.records.record import Record
from rematbench.worlds.records.suite_cells import Cell
from rematbench.worlds.run_records import activation_bytes, measured_record

TEXT_BYTES = 4 << 20


def rerun(record: Record, cell: Cell) -> Record:
    """The record of a new training run with the number of steps of a record."""
    assert record.measured is not None
    return run(cell, record.measured.steps)


def select_cells(cells: Sequence[Cell]) -> tuple[list[Cell], list[str]]:
    """The cells to train: keep_all on every problem, and every other method and variant on the
    first problem where its program is not keep_all's.  Also return a line for each problem, with
    the omitted cells and the reasons."""
    trained: list[Cell] = []
    where: dict[str, str] = {}
    left_out: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        problem, name = cell.name.split(".", maxsplit=1)
        reason = f"trained on {where[name]}" if name in where else _without_work(cell)
        if reason:
            left_out.setdefault(problem, {}).setdefault(reason, []).append(name)
            continue
        trained.append(cell)
        if cell.method.name != IDENTITY:
            where[name] = problem
    lines = []
    for problem, reasons in left_out.items():
        words = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
        lines.append(f"{problem}, left out: {'; '.join(words)}")
    return trained, lines


def _without_work(cell: Cell) -> str:
    """The reason why a cell has no loss curve of its own; empty if the cell has a loss curve."""
    if not isinstance(cell.plan, Plan):
        return cell.plan.reason.removeprefix(f"{cell.method.name}: ")
    base = cell.problem.base_plan
    if cell.method.name != IDENTITY and lower(cell.plan, cell.problem) == lower(base, cell.problem):
        return f"{IDENTITY}'s program"
    return ""


def run(cell: Cell, steps: int) -> Record:
    """The record of a training run of `steps` steps, in its own processes; the record stores only
    losses."""
    from rematbench.worlds.torch import rank_processes  # noqa: PLC0415  # torch is optional
    from rematbench.worlds.torch.batch import standard_library  # noqa: PLC0415
    from rematbench.worlds.torch.case import Case  # noqa: PLC0415
    from rematbench.worlds.torch.parameters import AdamW  # noqa: PLC0415

    assert isinstance(cell.plan, Plan)
    case = Case(
        name=cell.name,
        problem=cell.problem,
        plan=cell.plan,
        steps=steps,
        measure=False,
        shards=False,
        text_bytes=TEXT_BYTES,
        optimizer=AdamW(lr=LEARNING_RATE),
        activation_bytes=activation_bytes(cell.problem, cell.plan),
    )
    (result,) = rank_processes.run_spawned([case], 3600.0)
    found = None
    if result.status == "ok":
        found = Measured(losses=tuple(result.losses))
    where: dict[str, Any] = {
        **rank_processes.versions("cpu"),
        "ranks_per_host": (cell.problem.layout.gpus,),
        "text": standard_library(TEXT_BYTES)[1],
    }
    outcome = (*record_status(result.status, result.reason), found)
    return measured_record("executed", cell, outcome, where)
