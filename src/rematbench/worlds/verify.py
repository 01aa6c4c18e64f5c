"""A new run of a record's job, in the world of the record."""

from collections.abc import Callable

from rematbench.packages.agreement import executor_record
from rematbench.packages.process import Device, baselines
from rematbench.plugins.registry import Registry
from rematbench.runs.cell import Cell
from rematbench.runs.record import Record, RecordError
from rematbench.worlds import executed, package, simulated, traced, trained
from rematbench.worlds.again import is_curve


def run_again(record: Record, cell_of: Callable[[], Cell], registry: Registry) -> Record:
    """The record of a new run.  `cell_of` makes the record's cell where our executor or simulator
    runs it.  RecordError for a published record."""
    if record.spec.method in baselines():
        return package.again(record)
    if record.world == "published":
        text = f"run {record.run_id} is published: only its authors can run it again"
        raise RecordError(text)
    cell = cell_of()
    if record.world == "simulated":
        return simulated.run(cell)
    if record.world == "traced":
        return traced.again(record, cell)
    if record.engine is not None and record.measured is not None:
        device: Device = "cpu" if record.engine.device == "cpu" else "cuda"
        return executor_record(cell.problem, device, record.measured.steps)
    if is_curve(record):
        return trained.again(record, cell)
    return executed.again(record, cell, registry)
