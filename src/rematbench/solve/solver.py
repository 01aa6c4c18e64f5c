"""HiGHS for mixed-integer programmes, without what it writes past Python."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp


def minimum(
    costs: NDArray[np.float64],
    integrality: NDArray[np.int_],
    bounds: Bounds,
    constraints: LinearConstraint,
    *,
    max_nodes: int,
    gap: float,
) -> NDArray[np.float64] | None:
    """The best variables found, or None if a limit passes without any (scipy.optimize.milp).

    `gap`: relative to the objective's bound, where the search may stop."""
    with _silent():
        result = milp(
            c=costs,
            integrality=integrality,
            bounds=bounds,
            constraints=constraints,
            options={"node_limit": max_nodes, "mip_rel_gap": gap},
        )
    found: NDArray[np.float64] | None = result.x
    return found


@contextmanager
def _silent() -> Iterator[None]:
    """HiGHS prints some of its messages to file descriptor 1 whatever its options say, where they
    would end inside a table or a plan that is written there."""
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
