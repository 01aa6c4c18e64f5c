"""The traced world: the executor runs one rank of a job of any size on fake tensors."""

from typing import Any

from rematbench.evaluate.evaluation import fullest
from rematbench.evaluate.result import Status
from rematbench.plan import Unsupported
from rematbench.worlds.records.measured import Measured
from rematbench.worlds.records.record import Record
from rematbench.worlds.records.suite_cells import Cell
from rematbench.worlds.run_records import measured_ranks, measured_record


def rerun(record: Record, cell: Cell) -> Record:
    """Trace the pipeline rank of a traced record again and return the new record."""
    return run(cell, record.measured.ranks[0].pp if record.measured else None)


def run(cell: Cell, stage: int | None = None) -> Record:
    """The record of a trace of the pipeline rank `stage` (None: the one with the largest simulated
    peak)."""
    from rematbench.worlds.torch import rank_processes  # noqa: PLC0415  # torch is optional
    from rematbench.worlds.torch.rank_model import NotExecutable  # noqa: PLC0415
    from rematbench.worlds.torch.single_rank import stage_rank, trace_rank  # noqa: PLC0415
    from rematbench.worlds.torch.storages import ExecutionError  # noqa: PLC0415

    where: dict[str, Any] = {**rank_processes.versions("cpu"), "device": "meta"}
    problem, plan = cell.problem, cell.plan
    outcome: tuple[Status, str, Measured | None]
    if isinstance(plan, Unsupported):
        return measured_record("traced", cell, ("unsupported", plan.reason, None), where)
    try:
        stage = fullest(problem, plan) if stage is None else stage
        result = trace_rank(problem, plan, stage)
        first = stage_rank(problem.layout, problem.system.parallel.rank_order, stage)
        ranks = measured_ranks(problem, plan, [result], 1, first)
        outcome = ("ok", "", Measured(ranks=ranks))
    except NotExecutable as error:
        outcome = ("unsupported", str(error), None)
    except ExecutionError as error:
        outcome = ("failed", str(error), None)
    return measured_record("traced", cell, outcome, where)
