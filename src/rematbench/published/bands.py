"""Bands: how far off predictions are for their kind of evidence, learnt from errors out of source.

A kind of evidence is how many things about a job no other source published: its stack, GPU
generation, scale (GPUs), context and mechanisms.  The half-width of a band is the 80 % quantile of
|ln(predicted / published)| over rows of that kind, each predicted with constants that never saw its
source; every source weighs 1.  Kinds with fewer sources than a quantile needs are pooled with their
neighbours, and more outside is never narrower (pool adjacent violators, Barlow et al. 1972).  All
numbers come from config/left_out.csv; LEVEL is what a band promises.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations
from statistics import fmean, median

from msgspec import Struct
from msgspec.structs import replace

from rematbench.problem import Problem
from rematbench.published.accuracy import SPEED, Row, number
from rematbench.published.evidence import Job, Known, Range, covered, job_of, known_cells
from rematbench.published.left_out import PEAK, log_error, out_of_source

LEVEL = 0.8
"""Share of published rows that a band is to hold."""

LEAST_SOURCES = 5
"""Sources of a kind of its own: of four the LEVEL quantile is nearly the largest.  Ours."""

Errors = dict[str, list[float]]
"""Absolute log errors by source."""


class Band(Struct, frozen=True, kw_only=True):
    """A band in logarithms, what of the job lies outside of what was published (what: in words),
    and the number of sources that the width is learnt from (0: its stack was calibrated by its
    user, and published ones as well)."""

    half_width: float
    outside: dict[str, str]
    sources: int

    def low(self, value: float) -> float:
        """Lower end around a prediction."""
        return value * math.exp(-self.half_width)

    def high(self, value: float) -> float:
        """Upper end around a prediction."""
        return value * math.exp(self.half_width)

    @property
    def evidence(self) -> str:
        """The kind of evidence in words."""
        if not self.outside:
            return "inside what was published"
        return f"outside what was published: {', '.join(self.outside.values())}"


# -- widths -------------------------------------------------------------------------------------


def quantile(errors: Errors, level: float = LEVEL) -> float:
    """Quantile over sources that weigh the same, a source's values sharing its weight: linear
    between the middles of the values' weights.  Of n values of weight 1 it is the value of rank
    level (n + 1/3) + 1/3, whose error is too high as often as too low, whatever the distribution
    (median-unbiased: Hyndman and Fan 1996, The American Statistician 50(4), type 8, which they
    recommend).  Hazen's rule (type 5), rank level n + 1/2, takes a lower one and covers less."""
    values = sorted((value, 1.0 / len(some)) for some in errors.values() for value in some)
    wanted, seen, last = level * len(errors) + (level - 0.5) / 3.0, 0.0, (0.0, values[0][0])
    for value, weight in values:
        middle = seen + weight / 2.0
        if middle >= wanted:
            return last[1] + (value - last[1]) * (wanted - last[0]) / (middle - last[0])
        seen, last = seen + weight, (middle, value)
    return values[-1][0]


def _own_quantile(errors: Sequence[float]) -> float:
    """Quantile over one source's rows, which weigh the same."""
    return quantile({str(row): [error] for row, error in enumerate(errors)})


class Pool(Struct, frozen=True):
    """Neighbouring kinds with one width: errors of the kinds up to `most` things outside."""

    most: int
    errors: Errors
    half_width: float


def _pool(most: int, *parts: Errors) -> Pool:
    errors: Errors = defaultdict(list)
    for part in parts:
        for source, some in part.items():
            errors[source] += some
    return Pool(most, dict(errors), quantile(errors))


class Bands(Struct, frozen=True):
    """Bands from published rows out of source, and what those rows cover."""

    covered: Range
    pools: tuple[Pool, ...]

    def band(self, job: Job) -> Band:
        """The band of a job's speed."""
        outside = self.covered.outside(job)
        pool = next((p for p in self.pools if len(outside) <= p.most), self.pools[-1])
        return Band(half_width=pool.half_width, outside=outside, sources=len(pool.errors))


def bands_of(known: Sequence[Known]) -> Bands:
    """The bands that rows of two sources or more teach; each row counts as the kind that it is
    beside the other sources."""
    kinds: dict[int, Errors] = defaultdict(lambda: defaultdict(list))
    for source, own in by_source(known).items():
        others = covered(cell.job for cell in known if cell.source != source)
        for cell in own:
            kinds[len(others.outside(cell.job))][source].append(abs(cell.log_error))
    pools: list[Pool] = []
    for most in sorted(kinds):
        pools.append(_pool(most, kinds[most]))
        while len(pools) > 1 and not _apart(pools[-2], pools[-1]):
            wider, narrower = pools.pop(), pools.pop()
            pools.append(_pool(wider.most, narrower.errors, wider.errors))
    return Bands(covered(cell.job for cell in known), tuple(pools))


def _apart(narrower: Pool, wider: Pool) -> bool:
    enough = min(len(narrower.errors), len(wider.errors)) >= LEAST_SOURCES
    return enough and narrower.half_width < wider.half_width


def by_source(known: Iterable[Known]) -> dict[str, list[Known]]:
    """Rows by source, in their order."""
    found: dict[str, list[Known]] = defaultdict(list)
    for cell in known:
        found[cell.source].append(cell)
    return dict(found)


# -- whether they hold --------------------------------------------------------------------------


class Coverage(Struct, frozen=True, kw_only=True):
    """A source's rows under bands that the other sources teach: the share inside, the median
    half-width, and the 80 % quantile of the rows' own errors (logarithms)."""

    source: str
    rows: int
    inside: float
    half_width: float
    error: float


def coverage(known: Sequence[Known]) -> list[Coverage]:
    """Every source left out in turn."""
    found = []
    for source, own in by_source(known).items():
        bands = bands_of([cell for cell in known if cell.source != source])
        widths = [bands.band(cell.job).half_width for cell in own]
        errors = [abs(cell.log_error) for cell in own]
        found.append(
            Coverage(
                source=source,
                rows=len(own),
                inside=fmean(e <= w for e, w in zip(errors, widths, strict=True)),
                half_width=median(widths),
                error=_own_quantile(errors),
            )
        )
    return found


def shipped_coverage(rows: Sequence[Row]) -> list[Coverage]:
    """Rows by source under the bands that they were predicted with."""
    cells: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        error, high, made = log_error(row), number(row, "pred_high"), number(row, f"pred_{SPEED}")
        if error is not None and high and made:
            cells[row["source"]].append((abs(error), math.log(high / made)))
    return [
        Coverage(
            source=source,
            rows=len(some),
            inside=fmean(error <= width for error, width in some),
            half_width=median(width for _, width in some),
            error=_own_quantile([error for error, _ in some]),
        )
        for source, some in cells.items()
    ]


def pooled(found: Sequence[Coverage], known: Sequence[Known]) -> Coverage:
    """All sources, each of weight 1."""
    errors = {key: [abs(cell.log_error) for cell in own] for key, own in by_source(known).items()}
    return Coverage(
        source="all, each source weighs 1",
        rows=len(known),
        inside=fmean(one.inside for one in found),
        half_width=median(one.half_width for one in found),
        error=quantile(errors),
    )


# -- ratios and peaks ---------------------------------------------------------------------------


def ratio_half_width(known: Iterable[Known], *, one_layout: bool) -> float:
    """80 % quantile of the error of ln(speed / other speed) over pairs of published rows of a
    sweep, of one layout or of any two; every source weighs 1."""
    groups: dict[tuple[str, ...], list[Known]] = defaultdict(list)
    for cell in known:
        groups[cell.layout if one_layout else cell.sweep].append(cell)
    found: Errors = defaultdict(list)
    for some in groups.values():
        for one, other in combinations(some, 2):
            found[one.source].append(abs(one.log_error - other.log_error))
    return quantile(found)


def peak_half_width(rows: Iterable[Row]) -> float:
    """80 % quantile of ln(published / predicted peak); what was overestimated counts as 0."""
    found: Errors = defaultdict(list)
    for row in rows:
        error = log_error(row, PEAK)
        if error is not None:
            found[row["source"]].append(max(0.0, -error))
    return quantile(found)


# -- what is shipped ----------------------------------------------------------------------------


@cache
def shipped() -> Bands:
    """The bands of the committed rows."""
    return bands_of(known_cells())


def band_of(problem: Problem, family: str) -> Band:
    """The band of a method's speed (composed name, parameters apart) on a problem.  A stack that
    its user calibrated has the band that follows, but where something lies outside."""
    found = shipped().band(job_of(problem, family))
    own = problem.system.scales.half_width
    if not own or (found.outside and found.half_width >= own):
        return found
    return replace(found, half_width=own, sources=0)


@cache
def ratio_band(*, one_layout: bool = True) -> float:
    """Half-width of ln(speed / other speed) on one stack: at one layout (methods, micro-batches and
    options of the stack differ), or at two layouts of a sweep."""
    return ratio_half_width(known_cells(), one_layout=one_layout)


@cache
def peak_band() -> float:
    """By how much, as a logarithm, a peak may lie above its prediction."""
    return peak_half_width(out_of_source())


def reserve_bytes(usable_bytes: int) -> int:
    """Device bytes to leave free, so that a plan fits although its peak lies above the prediction
    by as much as published peaks do."""
    return math.ceil(usable_bytes * -math.expm1(-peak_band()))


def leaving_reserve(problem: Problem) -> Problem:
    """The problem whose tuned plans leave that free."""
    return dataclasses.replace(problem, reserve_bytes=reserve_bytes(problem.usable_bytes))


def fits_word(headroom_bytes: float, usable_bytes: float) -> str:
    """`yes`, `tight` (less left than the error of predicted peaks), or `no`."""
    if headroom_bytes < 0:
        return "no"
    need = (usable_bytes - headroom_bytes) * math.exp(peak_band())
    return "tight" if need > usable_bytes else "yes"
