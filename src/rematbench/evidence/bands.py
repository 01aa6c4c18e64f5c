"""Bands of predicted speeds, learnt from the errors of rows predicted without their source.

A job is *outside* in a property (stack, GPU generation, cluster, scale in GPUs, context, shape,
mechanisms) if no other source published a job like it.  The number of properties outside is the
job's kind of evidence.  The half-width of a band is the LEVEL quantile (80 %) of
|ln(predicted / published)| over the rows of that kind.  Each row is predicted with constants fitted
without its source, and every source has weight 1.  Kinds with fewer than FEWEST_SOURCES sources are
pooled with their neighbours, and more properties outside never give a narrower band (pool adjacent
violators, Barlow et al. 1972).  Three cases give at least the same quantile over other rows: a job
outside in a property, over the rows outside in it; a job on a GPU unlike every shipped GPU, over
rows predicted with the constants of another GPU generation, scaled to the row's FLOP/s and bytes/s;
and a job with experts, which is a kind by itself, over the rows of config/left_out_experts.csv.
All other numbers come from config/left_out.csv.  `coverage` tests the rows of each source against
bands learnt from all other sources.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations
from statistics import fmean, median

from msgspec import Struct
from msgspec.json import encode
from msgspec.structs import replace

from rematbench.evaluate.evaluation import at_host_rate, host_rates, lacks_host_rate, not_timed
from rematbench.evaluate.evaluator import Lowered, Reserved, same_plan, timed, without_cluster
from rematbench.evaluate.result import Band, Fit, Result, at_middle_rate
from rematbench.evidence.job_evidence import (
    JobProperties,
    LeftOutCell,
    Range,
    covered,
    expert_errors,
    job_of,
    left_out_cells,
    log_error,
)
from rematbench.evidence.open_causes import widened
from rematbench.evidence.peaks import fit_of
from rematbench.evidence.published.sheets import SPEED, Row, number
from rematbench.evidence.quantiles import Errors, quantile, source_quantile
from rematbench.host.table import grouped
from rematbench.plan import Plan
from rematbench.plugins.registry import IDENTITY
from rematbench.problem import NOT_TIMED, Problem

FEWEST_SOURCES = 5
"""Smallest number of sources of a pool.  With four sources the LEVEL quantile is nearly the largest
error.  We chose the number."""

POOLED = ("all, each source weighs 1", "all, each row weighs 1")
"""The names of the two lines over all sources in the table of bands."""

# -- widths -------------------------------------------------------------------------------------


class Pool(Struct, frozen=True):
    """Neighbouring kinds of evidence that share one half-width. `most`: the largest number of
    properties in which jobs of these kinds lie outside the published range."""

    most: int
    errors: Errors
    half_width: float


def _pool(most: int, *parts: Errors) -> Pool:
    items = (item for part in parts for item in part.items())
    errors: Errors = grouped((source, error) for source, some in items for error in some)
    return Pool(most, errors, quantile(errors))


class Bands(Struct, frozen=True):
    """Bands learnt from rows predicted without their source, and the range of jobs that the rows
    cover.  `properties`: by property, the half-width learnt from the rows that are outside in it,
    and the number of their sources; `devices`, `experts`: errors under another generation's
    constants, and errors of rows with experts."""

    covered: Range
    pools: tuple[Pool, ...]
    devices: Errors = {}
    properties: dict[str, tuple[float, int]] = {}
    experts: Errors = {}

    def band(self, job: JobProperties) -> Band:
        outside = self.covered.outside(job)
        half_width, sources = self._like(job, outside)
        wider = quantile(self.devices) if job.device and self.devices else 0.0
        if wider > half_width:
            sources = len(self.devices)
            return Band(half_width=wider, outside=outside, sources=sources, other_generation=True)
        return Band(half_width=half_width, outside=outside, sources=sources)

    def _like(self, job: JobProperties, outside: dict[str, str]) -> tuple[float, int]:
        """The half-width for these properties outside, and the number of its sources."""
        if job.experts and self.experts:
            return quantile(self.experts), len(self.experts)
        pool = next((p for p in self.pools if len(outside) <= p.most), self.pools[-1])
        own = [self.properties[name] for name in outside if name in self.properties]
        return max([(pool.half_width, len(pool.errors)), *own])


def bands_of(cells: Sequence[LeftOutCell]) -> Bands:
    """The bands learnt from rows of at least two sources.  The kind of a row is the number of its
    properties that the other sources do not cover."""
    kinds: dict[int, Errors] = defaultdict(lambda: defaultdict(list))
    properties: dict[str, Errors] = defaultdict(lambda: defaultdict(list))
    for cell, outside in with_outside(cells):
        error = abs(cell.log_error)
        kinds[len(outside)][cell.source].append(error)
        for name in outside:
            properties[name][cell.source].append(error)
    pools: list[Pool] = []
    for most in sorted(kinds):
        pools.append(_pool(most, kinds[most]))
        while len(pools) > 1 and not _apart(pools[-2], pools[-1]):
            wider, narrower = pools.pop(), pools.pop()
            pools.append(_pool(wider.most, narrower.errors, wider.errors))
    jobs = covered(cell.job for cell in cells)
    own = {name: (quantile(errors), len(errors)) for name, errors in properties.items()}
    return Bands(jobs, tuple(pools), device_errors(cells), own)


def with_outside(
    cells: Sequence[LeftOutCell],
) -> Iterator[tuple[LeftOutCell, tuple[str, ...]]]:
    """Every row with the names of its properties that the other sources do not cover."""
    sources = by_source(cells)
    jobs = {source: {cell.job for cell in own} for source, own in sources.items()}
    for source, own in sources.items():
        others = covered(job for other in jobs if other != source for job in jobs[other])
        outside = {job: tuple(others.outside(job)) for job in jobs[source]}
        yield from ((cell, outside[cell.job]) for cell in own)


def device_errors(cells: Iterable[LeftOutCell]) -> Errors:
    """Absolute errors of ln(speed) of published rows, predicted with the constants of another GPU
    generation."""
    known = ((cell.source, cell.other_log_error) for cell in cells)
    return grouped((source, abs(error)) for source, error in known if error is not None)


def _apart(narrower: Pool, wider: Pool) -> bool:
    enough = min(len(narrower.errors), len(wider.errors)) >= FEWEST_SOURCES
    return enough and narrower.half_width < wider.half_width


def speed_errors(cells: Iterable[LeftOutCell]) -> Errors:
    """Absolute errors of ln(speed) of published rows."""
    return {key: [abs(cell.log_error) for cell in own] for key, own in by_source(cells).items()}


def by_source(cells: Iterable[LeftOutCell]) -> dict[str, list[LeftOutCell]]:
    return grouped((cell.source, cell) for cell in cells)


# -- ratios -------------------------------------------------------------------------------------


def ratio_errors(cells: Iterable[LeftOutCell], *, one_layout: bool) -> Errors:
    """Absolute errors of ln(speed / other speed) over pairs of published rows of one sweep;
    `one_layout`: only pairs with equal layouts."""
    groups = grouped((cell.layout if one_layout else cell.sweep, cell) for cell in cells)
    pairs = (pair for some in groups.values() for pair in combinations(some, 2))
    return grouped((one.source, abs(one.log_error - other.log_error)) for one, other in pairs)


# -- shipped bands ------------------------------------------------------------------------------


@cache
def shipped() -> Bands:
    """The bands learnt from the committed rows of config/left_out.csv."""
    bands, errors = bands_of(left_out_cells()), expert_errors()
    seen = replace(bands.covered, experts=bool(errors))
    return replace(bands, covered=seen, experts=errors)


def band_of(problem: Problem, family: str) -> Band:
    """The band of a method's speed on a problem; `family`: the composed name without parameters.

    A stack calibrated by its user has the half-width of the calibration, unless the job has
    properties outside and the shipped band is at least as wide.
    """
    found = widened(shipped().band(job_of(problem, family)), problem)
    own = problem.system.scales.half_width
    if not own or (found.outside and found.half_width >= own):
        return found
    return replace(found, half_width=own, sources=0)


# Why: docs/decisions/evidence.md, Which band has a ratio of two speeds?
@cache
def ratio_band(*, one_layout: bool = True) -> float:
    """Half-width of ln(speed / other speed) on one stack, either at one layout (methods or
    micro-batches differ) or between layouts of a sweep."""
    return quantile(ratio_errors(left_out_cells(), one_layout=one_layout))


# -- coverage -------------------------------------------------------------------------------------


class Coverage(Struct, frozen=True, kw_only=True):
    """Coverage of a source's rows: the share inside their bands, the median half-width, and the 80
    % quantile of absolute errors (both are logarithms)."""

    source: str
    rows: int
    inside: float
    half_width: float
    error: float


def _covered(source: str, errors: Sequence[float], widths: Sequence[float]) -> Coverage:
    """The coverage of a source's rows, each with its absolute error and its band's half-width."""
    inside = fmean(error <= width for error, width in zip(errors, widths, strict=True))
    error, half_width = source_quantile(errors), median(widths)
    return Coverage(
        source=source, rows=len(errors), inside=inside, half_width=half_width, error=error
    )


def coverage(cells: Sequence[LeftOutCell]) -> list[Coverage]:
    """The coverage of every source under bands learnt from the other sources."""
    found = []
    for source, own in by_source(cells).items():
        bands = bands_of([cell for cell in cells if cell.source != source])
        of_job = {job: bands.band(job).half_width for job in {cell.job for cell in own}}
        errors = [abs(cell.log_error) for cell in own]
        found.append(_covered(source, errors, [of_job[cell.job] for cell in own]))
    return found


def shipped_coverage(rows: Sequence[Row]) -> list[Coverage]:
    """The coverage of every source under the bands in the columns of its predicted rows."""
    cells: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        error, high, made = log_error(row), number(row, "pred_high"), number(row, f"pred_{SPEED}")
        if error is not None and high and made:
            cells[row["source"]].append((abs(error), math.log(high / made)))
    return [_covered(source, *zip(*some, strict=True)) for source, some in cells.items()]


def kind_coverage(errors: Errors) -> list[Coverage]:
    """The coverage of the errors of each source under a band learnt from those of the others."""
    found = []
    for source, own in errors.items():
        width = quantile({key: some for key, some in errors.items() if key != source})
        found.append(_covered(source, own, [width] * len(own)))
    return found


def pooled(coverages: Sequence[Coverage], errors: Errors, *, by_row: bool = False) -> Coverage:
    """The coverage over all sources, each of weight 1 (`by_row`: each row of weight 1); `errors`:
    the errors of each source."""
    weights = [one.rows if by_row else 1 for one in coverages]
    rows = [error for own in errors.values() for error in own]
    pairs = zip(coverages, weights, strict=True)
    return Coverage(
        source=POOLED[by_row],
        rows=len(rows),
        inside=fmean((one.inside for one in coverages), weights),
        half_width=median(one.half_width for one, weight in pairs for _ in range(weight)),
        error=source_quantile(rows) if by_row else quantile(errors),
    )


@cache
def inside_shares() -> tuple[float, float]:
    """The shares of the published rows inside the bands learnt from the other sources: each source
    of weight 1, and each row of weight 1."""
    cells = left_out_cells()
    found, errors = coverage(cells), speed_errors(cells)
    return pooled(found, errors).inside, pooled(found, errors, by_row=True).inside


# -- results ------------------------------------------------------------------------------------


def with_band(result: Result, family: str = "") -> Result:
    """A result with the band of its speed and the word for its headroom.  The band is that of
    `family`, or by default that of the result's methods (keep_all if they change nothing)."""
    plan, verdict, problem = result.plan, result.verdict, result.problem
    if not family:
        idle = plan is not None and same_plan(plan) == same_plan(result.base)
        family = IDENTITY if idle else result.family
    fit: Fit = "no"
    if verdict is not None and verdict.fits:
        fit = fit_of(problem, verdict.headroom_bytes)
    elif verdict is not None and verdict.expandable:
        fit = "expandable"
    band = None if result.not_timed else band_of(problem, family)
    return replace(result, error_band=band, fit=fit)


def with_host_rates(result: Result, family: str = "") -> Result:
    """A result with its band (`with_band`); on a node without a host rate the seconds are those of
    `at_middle_rate`, and the band is wider by as much as the slowest and the fastest measured
    rate change the step."""
    problem, plan, result = result.problem, result.plan, at_middle_rate(result)
    found, middle = with_band(result, family), result.evaluation
    if plan is None or middle is None or found.error_band is None:
        return found
    if not lacks_host_rate(problem, plan):
        return found
    apart = max(abs(math.log(s / middle.step_s)) for s in _steps_at_rates(problem, plan))
    why = f"{not_timed(problem, plan).removeprefix(NOT_TIMED)}, all of them inside the band"
    outside = {**found.error_band.outside, "host rate": why}
    band = replace(
        found.error_band, half_width=found.error_band.half_width + apart, outside=outside
    )
    return replace(found, error_band=band)


_AT_RATES: dict[tuple[Hashable, ...], tuple[float, float]] = {}


def _steps_at_rates(problem: Problem, plan: Plan) -> tuple[float, float]:
    """The seconds of a step at the slowest and at the fastest measured host rate.  They are cached,
    because a comparison ranks all of its results again whenever a late result arrives."""
    timing = encode((problem.cluster, problem.backend, problem.calibration))
    key = without_cluster(problem), timing, same_plan(plan)
    if key not in _AT_RATES:
        lowered, rates = Lowered(problem, plan), sorted(host_rates().values())
        there = [at_host_rate(problem, rate) for rate in (rates[0], rates[-1])]
        slow, fast = (timed(each, lowered, Reserved(0)).step_s for each in there)
        _AT_RATES[key] = slow, fast
    return _AT_RATES[key]


def with_ties(results: Sequence[Result], half_width: float) -> list[Result]:
    """The results, with ties marked: results that fit and are slower than the first fitting result
    by less than `half_width`, the error (a logarithm) of comparing two methods."""
    first = next((result for result in results if result.fits and result.timed), None)
    lowest = (first.tokens_per_s_per_gpu or 0.0) * math.exp(-half_width) if first else 0.0
    return [
        replace(result, tied=True)
        if result.fits
        and result.timed
        and result is not first
        and (result.tokens_per_s_per_gpu or 0.0) >= lowest
        else result
        for result in results
    ]
