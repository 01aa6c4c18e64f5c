"""Whether the cells of a problem train alike: the first loss and gradient norm of each cell against
those of the cell that keeps all activations.

Weights and batches come from the problem's seed, so all engines start from the same weights.  Later
steps depend on each engine's optimizer and are not compared.  A campaign times its cells and keeps
no whole gradients: equal norms are no proof that a method is lossless, but a wrong gradient seldom
has the right norm.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rematbench.runs.measured import BOUNDS, Measured
from rematbench.slurm.shown import OURS
from rematbench.workload import Precision

COLUMNS = ("against", "first_loss_error", "first_norm_error", "alike")


class CellRan(NamedTuple):
    """A cell that ran: its problem, method and precision, whether it keeps all activations, the
    engine that ran it, and its numbers (`found`)."""

    problem: str
    method: str
    precision: Precision
    keeps_all: bool
    engine: str
    found: Measured


def alike(cells: Sequence[CellRan | None]) -> list[dict[str, Any]]:
    """The values of COLUMNS for every cell; empty where the cell is a reference, has no reference
    or did not run (None)."""
    return [
        dict.fromkeys(COLUMNS, "") | (_beside(cell, _reference(cell, cells)) if cell else {})
        for cell in cells
    ]


def _reference(cell: CellRan, cells: Sequence[CellRan | None]) -> CellRan | None:
    """The cell of the same problem that keeps all activations, by our executor if there is one, or
    else by any engine."""
    every = [
        other
        for other in cells
        if other is not None and other.problem == cell.problem and other.keeps_all and _has(other)
    ]
    every.sort(key=lambda other: not _is_ours(other))
    return every[0] if every else None


def _has(cell: CellRan) -> bool:
    return bool(cell.found.losses and cell.found.gradient_norms)


def _is_ours(cell: CellRan) -> bool:
    return cell.engine.split(" ")[0] == OURS


def _beside(cell: CellRan, other: CellRan | None) -> dict[str, Any]:
    if other is None or other is cell or not _has(cell):
        return {}
    loss, norm = cell.found.first_errors(other.found)
    bound = BOUNDS[cell.precision]
    close = loss <= bound and norm <= bound  # False for a NaN
    name = other.method if _is_ours(other) else f"{other.method} ({other.engine})"
    values = (name, loss, norm, "yes" if close else "NO")
    return dict(zip(COLUMNS, values, strict=True))
