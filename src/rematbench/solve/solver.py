"""Solves mixed-integer programmes with HiGHS, and suppresses its messages to file descriptor 1."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

Row = tuple[dict[int, float], float]
"""A constraint: the factor of each column, and the upper limit of the sum."""


def minimum(
    costs: NDArray[np.float64],
    integrality: NDArray[np.int_],
    rows: Sequence[Row],
    *,
    lower: NDArray[np.float64],
    upper: NDArray[np.float64],
    max_nodes: int,
    gap: float,
) -> NDArray[np.float64] | None:
    """The variables of the best solution; None if the node limit is reached without a solution.
    scipy.optimize.milp stops when the relative gap of the objective is at most `gap`."""
    # The imports take half a second, which every start of Snakemake and of a job would pay.
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415
    from scipy.sparse import csr_array  # noqa: PLC0415

    data = [value for row, _ in rows for value in row.values()]
    where = [column for row, _ in rows for column in row]
    starts = np.cumsum([0, *(len(row) for row, _ in rows)])
    matrix = csr_array((data, where, starts), shape=(len(rows), len(costs)))
    with _silent():
        result = milp(
            c=costs,
            integrality=integrality,
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(matrix, ub=np.array([most for _, most in rows])),
            options={"node_limit": max_nodes, "mip_rel_gap": gap},
        )
    found: NDArray[np.float64] | None = result.x
    return found


@contextmanager
def _silent() -> Iterator[None]:
    """Redirect file descriptor 1 to the null device.  HiGHS prints some messages there with all
    options; they would end up in a table or a plan on standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
