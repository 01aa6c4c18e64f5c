"""Least squares and evidence for every fit of config/kernels."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from rematbench.cost.kernel_rates import Evidence
from rematbench.published.kernel_rows import KernelRow
from rematbench.published.kernel_sources import Sources, outliers

Array: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = Sequence[KernelRow]

AT_BOUND = 1e-4
"""The share of a parameter's start within which the parameter is at its bound."""


def rounded(value: float, least: float = 1e-6) -> float:
    """A value rounded to four significant digits, as in the files; 0 where it is below `least`."""
    return float(f"{value:.4g}") if value >= least else 0.0


def solve(
    misses: Callable[[Array], Array],
    start: Sequence[float],
    bounds: tuple[Sequence[float], Sequence[float]],
    near: float | None = None,
) -> list[float]:
    """The parameters that minimise the squared `misses` within `bounds`, deterministically.
    `misses`: parameters -> residuals (rows,), differences of logarithms.  `near`: the residual at
    which a row's weight starts to fall (soft L1; None: plain least squares)."""
    best = least_squares(
        misses,
        start,
        bounds=bounds,
        x_scale=start,
        diff_step=np.full(len(start), 1e-4),
        loss="linear" if near is None else "soft_l1",
        f_scale=1.0 if near is None else near,
    )
    ends = np.where(best.x - bounds[0] < np.subtract(bounds[1], best.x), *bounds)
    at_end = np.abs(best.x - ends) < AT_BOUND * np.asarray(start)
    return [float(x) for x in np.where(at_end, ends, best.x)]


def document_weights(rows: Rows) -> Array:
    """Weights of residuals, shape (rows,), that give every document the same weight in a sum of
    squares."""
    documents = [row.source for row in rows]
    return np.array([documents.count(name) ** -0.5 for name in documents])


def evidence(
    sources: Sources,
    rows: Rows,
    speeds: Mapping[int, float],
    fitted: tuple[str, ...],
    source: str = "",
) -> Evidence:
    """The evidence of fitted numbers; `speeds`: measured over predicted speed by line of the CSV.
    KernelFitError where an outlier has no reason."""
    off = {line: float(speed) - 1.0 for line, speed in speeds.items()}
    return Evidence(
        fitted=fitted,
        rows=len(rows),
        sources=len({row.source for row in rows}),
        source=source,
        outliers=outliers(sources, rows, off),
    )
