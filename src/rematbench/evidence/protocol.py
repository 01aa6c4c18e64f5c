"""The value of a user's calibration: published stacks calibrated on a few rows drawn at random.

For every (source, stack, cluster) with LEAST_ROWS rows or more, `DRAWS` draws of 1, 3 and 5 rows
calibrate predictions out of source, with a prior from the other sources.  The errors are those of
the rows that were not drawn.
"""

from collections.abc import Sequence
from functools import cache
from statistics import median

import numpy as np
from msgspec import Struct

from rematbench.costs.flops import model_flop_per_token
from rematbench.evidence.accuracy import SPEED, Row, number
from rematbench.evidence.bands import own_quantile, quantile
from rematbench.evidence.left_out import out_of_source
from rematbench.evidence.published.rows import read_case
from rematbench.evidence.user_fit import (
    Array,
    MeasuredRows,
    ScalePrior,
    by_stack,
    learnt,
    left_one_by_one,
    mean_error,
    solved,
)
from rematbench.evidence.user_fit import measured as of_rows
from rematbench.host.table import Column, Table, percent, whole
from rematbench.plugins.discover import discover

COUNTS = (1, 3, 5)
DRAWS = 20
LEAST_ROWS = 10
SEED = 24
WIDEST = 10.0
"""Largest half-width that a stack file holds (`spec.system.Scales`)."""


class Calibrated(Struct, frozen=True, kw_only=True):
    """Mean errors of a stack as fractions: `uncalibrated`, and `fitted` with the scales fitted to
    all rows.  `after` and `mfu` have, by number of calibrating rows, the median over draws of the
    mean error of the rows that were not drawn: calibrated, and predicted by one MFU of the drawn
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
    """The committed rows out of source by (source, stack, cluster)."""
    return by_stack(out_of_source())


@cache
def prior(without: str = "") -> ScalePrior:
    """The prior from all sources except `without` (a source; empty: from all sources)."""
    return learnt([of_rows(rows) for (source, *_), rows in stacks().items() if source != without])


@cache
def calibrated() -> tuple[Calibrated, ...]:
    """The errors of all stacks with LEAST_ROWS rows or more."""
    found = []
    for (source, system, cluster), rows in stacks().items():
        if len(rows) < LEAST_ROWS:
            continue
        data, mfus = of_rows(rows), _log_mfus(rows)
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
    COUNTS), over the stacks with LEAST_ROWS rows or more, each of weight 1."""
    known = max(k for k in COUNTS if k <= count)
    errors: dict[str, list[float]] = {}
    for key, rows in stacks().items():
        if len(rows) >= LEAST_ROWS:
            data = of_rows(rows)
            left = [_calibrated(data, prior(key[0]), some) for some in _draws(len(rows), known)]
            errors[" ".join(key)] = [abs(float(error)) for some in left for error in some]
    return quantile(errors)


def band_of_rows(data: MeasuredRows, theta: Array, before: ScalePrior) -> float:
    """Half-width of the band after a calibration on `data`, with the fitted log scales `theta`: the
    wider of `band_after` and of the LEVEL quantile of the rows' own absolute log errors, each left
    out of the fit (`bands.quantile`: the largest of up to three).

    Reasons: few rows that agree do so by chance, so they never narrow what published stacks teach;
    rows that disagree are of a stack, or of a log, whose errors published stacks do not have.
    Nothing can be left out of a single row: what the fit leaves of it is then the least that the
    band must hold.
    """
    one = len(data.errors) == 1
    errors = [float(data.left(theta)[0])] if one else left_one_by_one(data, before)
    own = own_quantile([abs(error) for error in errors])
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
        flop = model_flop_per_token(case.model, case.seq_len)
        found.append((number(row, SPEED) or 0.0) * flop)
    logs: Array = np.log(np.array(found))
    return logs


def _one_mfu(mfus: Array, some: Sequence[int]) -> Array:
    """Log errors of the rows not in `some`, each predicted with the geometric mean of the MFUs in
    `some`.  `mfus`: log FLOP/s, (rows,); the rows of a stack on a cluster share one GPU peak."""
    left: Array = np.mean(mfus[list(some)]) - mfus[_rest(len(mfus), some)]
    return left


def calibrated_table() -> Table:
    """One line per published stack: mean errors by the number of calibrating rows."""
    rows = [
        {
            **{key: getattr(one, key) for key in ("source", "system", "cluster", "rows")},
            "after_0": one.uncalibrated,
            **{f"after_{k}": value for k, value in one.after.items()},
            "fitted": one.fitted,
            **{f"mfu_{k}": value for k, value in one.mfu.items()},
        }
        for one in calibrated()
    ]
    return Table(
        name="calibrated",
        title="Calibrated by its user: mean error of the rest after a few rows of a stack",
        columns=(
            *(Column(key, key) for key in ("source", "system", "cluster")),
            Column("rows", "rows", whole),
            *(Column(f"after_{k}", f"after {k} rows, %", percent) for k in (0, *COUNTS)),
            Column("fitted", "the scales fitted to all rows, %", percent),
            *(Column(f"mfu_{k}", f"one MFU of {k} rows, %", percent) for k in COUNTS),
        ),
        rows=tuple(rows),
        note=f"Predictions out of source; medians of {DRAWS} draws of rows. One MFU: the geometric "
        "mean over the same rows. After 0 rows: as predicted.",
    )
