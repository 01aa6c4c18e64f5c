"""The simulated world: a plan is lowered and evaluated, and nothing is run."""

from rematbench.evaluate.result import evaluate_method
from rematbench.worlds.records.cell import Cell
from rematbench.worlds.records.record import Record, make_record


def run(cell: Cell) -> Record:
    """The record of a simulated cell."""
    return make_record(evaluate_method(cell.problem, cell.method, cell.base), cell.method)
