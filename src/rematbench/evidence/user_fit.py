"""Calibration of a stack by its user: four scales fitted to a few rows of the user's logs.

The step time is the length of the longest path, and the length of a path is a sum of terms that the
scales multiply.  So ln(step) is convex in the log scales theta (Boyd and Vandenberghe 2004, section
4.5).  The model of ln(step) is the larger of two tangents b + S theta, one at the prediction and
one at a slow host, with S the slopes d ln(step) / d ln(scale).  With e = ln(predicted / published
speed) the log scales are the MAP of e = max(b + S theta) + noise, theta ~ N(0, spreads^2).  For
fixed active tangents the MAP is a closed-form ridge regression (Hoerl and Kennard 1970).  It is
repeated until the active tangents no longer change, once from each tangent as the start.  The
spreads are the prior spreads of the same kinds of constants in a refit (evidence/fit.py).  The
noise is learnt from published stacks, each of the same weight, by expectation maximisation.

The value of a calibration is measured on published stacks: for every (source, stack, cluster) with
FEWEST_ROWS rows or more, `DRAWS` draws of 1, 3 and 5 rows calibrate predictions made without the
source, with a prior from the other sources.  Errors are measured on the rows that were not drawn.
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rematbench.costs.flops import model_flop_per_token
from rematbench.evidence.calibrate import SCALES, SLOW_HOST
from rematbench.evidence.fit import PRIORS, ROW_SPREAD
from rematbench.evidence.job_evidence import LATE_STEP, log_error, out_of_source, slope_column
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import SPEED, Row, number
from rematbench.evidence.quantiles import quantile, source_quantile
from rematbench.host.table import grouped
from rematbench.plugins.discover import discover

Array: TypeAlias = NDArray[np.float64]

ROUNDS = 50
"""Rounds of expectation maximisation, after which the noise is stable to three digits."""

KINDS = ("kernel_scale", "kernel_scale", "nic_efficiency", "host_launch_s")
"""The fitted constants that the scales stand for, in the order of SCALES."""
SPREADS = tuple(PRIORS[kind].spread for kind in KINDS)

# Why: docs/decisions/evidence.md, Why has a fit to a user's rows two tangents?
LATE = np.array([math.log(SLOW_HOST) * (name == "host") for name in SCALES])
"""The log scales, (scales,), at which the second tangent is taken; the first is taken at zero."""
TURNS = 10
"""The most ridge regressions from one start, because a row can alternate between its tangents."""


class ScalePrior(Struct, frozen=True, kw_only=True):
    """Standard deviations of the log scales between stacks (`spreads`), and of the log errors that
    no scale explains (`noise`)."""

    spreads: tuple[float, ...]
    noise: float


class MeasuredRows(Struct, frozen=True):
    """Rows of one stack on one cluster: slopes (tangents x rows x scales), heights at log scales of
    zero (tangents x rows), and log errors (rows)."""

    slopes: Array
    heights: Array
    errors: Array

    def some(self, rows: Sequence[int]) -> "MeasuredRows":
        own = list(rows)
        return MeasuredRows(self.slopes[:, own], self.heights[:, own], self.errors[own])

    def at(self, theta: Array) -> tuple[Array, Array]:
        """Slopes (rows x scales) and heights (rows) of the larger tangent of each row at log scales
        `theta` (scales)."""
        holds = (self.heights + self.slopes @ theta).argmax(axis=0)
        rows = np.arange(len(self.errors))
        return self.slopes[holds, rows], self.heights[holds, rows]

    def left(self, theta: Array) -> Array:
        """Log errors (rows) that remain under log scales `theta` (scales)."""
        slopes, heights = self.at(theta)
        left: Array = self.errors - heights - slopes @ theta
        return left


def measured(rows: Sequence[Row]) -> MeasuredRows:
    """The tangents and log errors of predicted rows, which must have a published speed."""
    slopes = np.array(
        [
            [[number(row, slope_column(k, late=late)) or 0.0 for k in SCALES] for row in rows]
            for late in (False, True)
        ]
    )
    steps = np.array([number(row, LATE_STEP) or 0.0 for row in rows])
    heights = np.stack([np.zeros(len(rows)), steps - slopes[1] @ LATE])
    errors = [log_error(row) for row in rows]
    assert None not in errors
    return MeasuredRows(slopes, heights, np.array(errors, dtype=np.float64))


def solved(rows: MeasuredRows, prior: ScalePrior) -> tuple[Array, Array]:
    """The maximum a posteriori (MAP) log scales, shape (scales,), and their covariance: those of
    the likeliest iterate."""
    met: list[tuple[Array, Array]] = []
    for start in (np.zeros_like(LATE), LATE):
        theta, before = start, None
        for _ in range(TURNS):
            slopes, heights = rows.at(theta)
            if before is not None and np.array_equal(before, slopes):
                break
            theta, covariance = _ridge(slopes, rows.errors - heights, prior)
            met.append((theta, covariance))
            before = slopes
    return min(met, key=lambda one: _surprise(rows, one[0], prior))


def _ridge(slopes: Array, errors: Array, prior: ScalePrior) -> tuple[Array, Array]:
    """The MAP log scales and their covariance for errors that are linear in the log scales, with
    `slopes` (rows x scales) and `errors` (rows)."""
    precision = slopes.T @ slopes / prior.noise**2 + np.diag(np.array(prior.spreads) ** -2.0)
    covariance: Array = np.linalg.inv(precision).astype(np.float64)
    theta: Array = covariance @ slopes.T @ errors / prior.noise**2
    return theta, covariance


def _surprise(rows: MeasuredRows, theta: Array, prior: ScalePrior) -> float:
    """Minus twice the log density of log scales and errors, up to a constant."""
    believed = theta / np.array(prior.spreads)
    return float(np.sum((rows.left(theta) / prior.noise) ** 2) + np.sum(believed**2))


def learnt(stacks: Sequence[MeasuredRows]) -> ScalePrior:
    """The prior with SPREADS and the noise of maximum likelihood over published stacks, each of
    weight 1."""
    prior = ScalePrior(spreads=SPREADS, noise=ROW_SPREAD)
    for _ in range(ROUNDS):
        left = []
        for rows in stacks:
            theta, covariance = solved(rows, prior)
            slopes, _ = rows.at(theta)
            spread = np.einsum("ij,jk,ik->i", slopes, covariance, slopes)
            left.append(float(np.mean(rows.left(theta) ** 2 + spread)))
        prior = ScalePrior(spreads=SPREADS, noise=math.sqrt(float(np.mean(left))))
    return prior


def mean_error(log_errors: Array) -> float:
    """Mean of |predicted / measured - 1| over log errors."""
    return float(np.mean(np.abs(np.expm1(log_errors))))


def leave_one_out_errors(rows: MeasuredRows, prior: ScalePrior) -> list[float]:
    """The log error of each row under the scales fitted to the other rows (there are two rows or
    more)."""
    count = len(rows.errors)
    return [float(_calibrated(rows, prior, _rest(count, [at]))[0]) for at in range(count)]


# -- suspect and refused rows ----------------------------------------------------------------------

SIGMAS = 3.0
"""Number of standard deviations beyond which a row is suspect, or refused."""


def suspects(rows: MeasuredRows, theta: Array, prior: ScalePrior) -> list[str]:
    """At most two warnings, each naming the row that is furthest off: rows whose remaining error
    exceeds SIGMAS times the noise, and scales beyond SIGMAS of their prior spreads.  One row with a
    mistyped unit can cause either."""
    left, found = rows.left(theta), []
    far = np.flatnonzero(np.abs(left) > SIGMAS * prior.noise)
    if len(far):
        worst = int(np.argmax(np.abs(left)))
        others = [str(row + 1) for row in far if row != worst]
        moved = (
            f", and rows {', '.join(others)} are off too, perhaps because of it" if others else ""
        )
        found.append(
            f"row {worst + 1} is suspect: after the fit it is off by "
            f"{math.expm1(left[worst]):+.0%}, more than {SIGMAS:g} times the error of published "
            f"stacks ({prior.noise:.1%}){moved}; check its units and columns"
        )
    named = zip(SCALES, theta, prior.spreads, strict=True)
    if strange := [
        f"{name} x {math.exp(log):.3g} ({math.exp(-SIGMAS * spread):.2f} to "
        f"{math.exp(SIGMAS * spread):.2f})"
        for name, log, spread in named
        if abs(log) > SIGMAS * spread
    ]:
        worst = int(np.argmax(np.abs(rows.errors))) + 1
        found.append(
            f"row {worst} is suspect: the fit needs scales outside of the usual range (in "
            f"brackets, {SIGMAS:g} standard deviations): {', '.join(strange)}"
        )
    return found


def refusals(rows: Sequence[Row], prior: ScalePrior) -> list[str]:
    """One line for each row that no scale explains: a step faster than its kernels, or a job given
    twice with contradictory speeds.  Rows are the same job if their cases are equal; other columns
    (`table`, `source`, `mfu_pct_as_published`, ...) may differ."""
    found, registry = [], discover()
    seen: dict[bytes, tuple[int, float]] = {}
    for line, row in enumerate(rows, start=1):
        step_s, rate = float(row["pred_step_s"]), float(row[SPEED])
        told_s = step_s * float(row[f"pred_{SPEED}"]) / rate
        kernels_s = step_s * (number(row, slope_column("kernels")) or 0.0)
        if told_s < kernels_s * math.exp(-SIGMAS * prior.spreads[0]):
            found.append(
                f"row {line}: the measured step takes {told_s:.4g} s, but its kernels alone take "
                f"{kernels_s:.4g} s"
            )
        other, before = seen.setdefault(read_case(row, registry).key, (line, rate))
        if abs(math.log(rate / before)) > SIGMAS * math.sqrt(2.0) * prior.noise:
            found.append(
                f"rows {other} and {line} contradict each other: they measure the same job at "
                f"{before:g} and {rate:g} tokens/s/GPU"
            )
    return found


# -- the value of a calibration -------------------------------------------------------------------

COUNTS = (1, 3, 5)
DRAWS = 20
FEWEST_ROWS = 10
SEED = 24
WIDEST = 10.0
"""Largest half-width that a stack file holds (`inputs.system.Scales`)."""


class Calibrated(Struct, frozen=True, kw_only=True):
    """Mean errors of a stack as fractions: `uncalibrated`, and `fitted` with the scales fitted to
    all rows.  `after` and `mfu` map the number of calibrating rows to the median over draws of the
    mean error of the rows that were not drawn: after calibration, and with one MFU of the drawn
    rows."""

    source: str
    system: str
    cluster: str
    rows: int
    uncalibrated: float
    fitted: float
    after: dict[int, float]
    mfu: dict[int, float]


@cache
def stacks() -> dict[tuple[str, str, str], list[Row]]:
    """The committed rows, predicted without their source, that have a speed and slopes, by
    (source, stack, cluster)."""
    timed = (row for row in out_of_source() if log_error(row) is not None)
    sloped = (row for row in timed if number(row, slope_column(SCALES[0])) is not None)
    return grouped(((row["source"], row["system"], row["cluster"]), row) for row in sloped)


@cache
def prior(without: str = "") -> ScalePrior:
    """The prior from all sources except `without` (a source; empty: from all sources)."""
    return learnt([measured(rows) for (source, *_), rows in stacks().items() if source != without])


@cache
def calibrated() -> tuple[Calibrated, ...]:
    """The errors of all stacks with FEWEST_ROWS rows or more."""
    found = []
    for (source, system, cluster), rows in stacks().items():
        if len(rows) < FEWEST_ROWS:
            continue
        data, mfus = measured(rows), _log_mfus(rows)
        before = prior(source)
        draws = {count: _draws(len(rows), count) for count in COUNTS}
        rests = {k: [_calibrated(data, before, some) for some in draws[k]] for k in COUNTS}
        flat = {k: [_one_mfu(mfus, some) for some in draws[k]] for k in COUNTS}
        found.append(
            Calibrated(
                source=source,
                system=system,
                cluster=cluster,
                rows=len(rows),
                uncalibrated=mean_error(data.errors),
                fitted=mean_error(data.left(solved(data, before)[0])),
                after={k: median(mean_error(left) for left in rests[k]) for k in COUNTS},
                mfu={k: median(mean_error(left) for left in flat[k]) for k in COUNTS},
            )
        )
    return tuple(found)


def band_after(count: int) -> float:
    """80 % quantile of |log error| after a calibration on `count` rows (rounded down to a number of
    COUNTS), over the stacks with FEWEST_ROWS rows or more, each of weight 1."""
    known = max(k for k in COUNTS if k <= count)
    errors: dict[str, list[float]] = {}
    for key, rows in stacks().items():
        if len(rows) >= FEWEST_ROWS:
            data = measured(rows)
            left = [_calibrated(data, prior(key[0]), some) for some in _draws(len(rows), known)]
            errors[" ".join(key)] = [abs(float(error)) for some in left for error in some]
    return quantile(errors)


def band_of_rows(data: MeasuredRows, theta: Array, before: ScalePrior) -> float:
    """Half-width of the band after a calibration on `data`, with the fitted log scales `theta`. It
    is the larger of `band_after` and the LEVEL quantile of the rows' absolute leave-one-out log
    errors (`bands.quantile`: the largest of up to three).

    Reasons: a few rows may agree by chance, so they never narrow the band of published stacks. Rows
    that disagree show errors that published stacks do not have. A single row cannot be left out;
    its remaining error is then the smallest half-width.
    """
    one = len(data.errors) == 1
    errors = [float(data.left(theta)[0])] if one else leave_one_out_errors(data, before)
    own = source_quantile([abs(error) for error in errors])
    return min(max(band_after(len(data.errors)), own), WIDEST)


def _draws(rows: int, count: int) -> list[list[int]]:
    random = np.random.default_rng(SEED)
    return [list(map(int, random.choice(rows, count, replace=False))) for _ in range(DRAWS)]


def _rest(rows: int, some: Sequence[int]) -> list[int]:
    return [index for index in range(rows) if index not in set(some)]


def _calibrated(data: MeasuredRows, before: ScalePrior, some: Sequence[int]) -> Array:
    """Log errors of the rows not in `some`, under the scales fitted to the rows in `some`."""
    theta, _ = solved(data.some(some), before)
    return data.some(_rest(len(data.errors), some)).left(theta)


def _log_mfus(rows: Sequence[Row]) -> Array:
    registry, found = discover(), []
    for row in rows:
        case = read_case(row, registry)
        flop = model_flop_per_token(case.workload(case.model))
        found.append((number(row, SPEED) or 0.0) * flop)
    logs: Array = np.log(np.array(found))
    return logs


def _one_mfu(mfus: Array, some: Sequence[int]) -> Array:
    """Log errors of the rows not in `some`, each predicted with the geometric mean of the MFUs in
    `some`.  `mfus`: log FLOP/s, (rows,); the rows of a stack on a cluster share one GPU peak."""
    left: Array = np.mean(mfus[list(some)]) - mfus[_rest(len(mfus), some)]
    return left
