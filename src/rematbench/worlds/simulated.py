"""The simulated world: a plan is lowered and evaluated, and nothing is run."""

from rematbench.evaluate.result import evaluate_method
from rematbench.worlds.records.cell import Cell
from rematbench.worlds.records.record import Record, make_record


def run(cell: Cell) -> Record:
    """The record of a simulated cell."""
    outcome = evaluate_method(cell.problem, cell.method, cell.base)
    return make_record(cell.problem, cell.method, outcome, base=cell.base)
