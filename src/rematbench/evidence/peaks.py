"""Margins of predicted device bytes, each learnt from published rows that print the same quantity.

A row prints a quantity of the fullest GPU: the bytes that torch hands out (allocated), the bytes
that its allocator holds (reserved), or the device total, which is the reserved bytes with the CUDA
context and the communicators (`Problem.room_bytes` less `Problem.usable_bytes`).  A verdict is on
the device total.  A margin is the 80 % quantile of ln(published / predicted), where an overestimate
counts as 0 and every source has weight 1.  A quantity has at least the margin of each of its parts.
Jobs that train adapters have margins of their own.  Computed sizes and peaks whose quantity the
source does not state are left out.  The lines are those of config/left_out_bytes.csv, which
`rematbench calibrate --bytes` writes.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from itertools import product
from statistics import median
from typing import get_args

from rematbench.evaluate.result import Fit
from rematbench.evaluate.verdict import unknown_bytes
from rematbench.evidence.job_evidence import BYTES, PEAK, log_error, out_of_source, published_stack
from rematbench.evidence.published.row_cases import stack_of
from rematbench.evidence.published.sheets import PeakKind, Quantity, Row, read_sheet
from rematbench.evidence.quantiles import Errors, quantile
from rematbench.inputs.facts import CPU
from rematbench.inputs.paths import data_dir
from rematbench.problem import Problem

ABOUT: PeakKind = "device"
"""The quantity of bytes that decides a verdict."""
MOST_MISS = 0.10
"""Largest share by which published device totals of a stack may exceed the predicted ones; beyond
it a device total is not shown as a prediction."""


def trained_by(whole: bool) -> str:
    """The word for what trains: all weights of the model, or adapters (only a part trains)."""
    return "weights" if whole else "adapters"


@cache
def lines_of_bytes(trains: str = trained_by(whole=True)) -> tuple[Row, ...]:
    """The lines of config/left_out_bytes.csv for jobs that train all weights, or for adapters
    (`trains`: a word of `trained_by`)."""
    needed = ("source", "quantity", "trains", "bytes", "pred_bytes")
    lines = read_sheet(data_dir("config") / BYTES, needed)
    return tuple(line for line in lines if line["trains"] == trains)


def errors_of(lines: Iterable[Row], quantity: PeakKind) -> Errors:
    """ln(published / predicted) of the lines of a quantity, by source."""
    found: Errors = defaultdict(list)
    for line in lines:
        if line["quantity"] == quantity:
            found[line["source"]].append(-(log_error(line, "bytes") or 0.0))
    return dict(found)


# Why: docs/decisions/evidence.md, Which rows does the margin of device memory come from?
def widest(lines: Iterable[Row], quantity: PeakKind = ABOUT) -> tuple[float, Errors]:
    """The margin that lines give a quantity, as a logarithm, and the errors behind it: those of the
    quantity or of the part of it that gives the largest margin."""
    lines, parts = tuple(lines), get_args(Quantity)[: get_args(Quantity).index(quantity) + 1]
    every = [found for part in parts if (found := errors_of(lines, part))]
    widths = [quantile(_above(errors)) for errors in every]
    return max(zip(widths, every, strict=True), key=lambda one: one[0], default=(0.0, {}))


def _above(errors: Errors) -> Errors:
    return {source: [max(0.0, error) for error in some] for source, some in errors.items()}


@cache
def margin(quantity: PeakKind = ABOUT, trains: str = trained_by(whole=True)) -> float:
    """The margin of a quantity, as a logarithm."""
    return widest(lines_of_bytes(trains), quantity)[0]


def of_sources(lines: Iterable[Row]) -> list[str]:
    """A line for each quantity and source, apart for jobs that train all weights and for adapters:
    the number of rows, their median absolute error, and the share inside the margin that the other
    sources give."""
    lines, found = tuple(lines), []
    for trains, quantity in product(sorted({one["trains"] for one in lines}), get_args(Quantity)):
        alike = [line for line in lines if line["trains"] == trains]
        for source, errors in errors_of(alike, quantity).items():
            others = [line for line in alike if line["source"] != source]
            width, _ = widest(others, quantity)
            inside = sum(error <= width for error in errors) / len(errors)
            off = 100 * median(abs(math.expm1(-error)) for error in errors)
            others_give = f"the margin of the other sources, +{100 * math.expm1(width):.1f} %"
            which = f"{trains}, {quantity}, {source[:48]}"
            said = f"{off:.1f} % off in the median, {100 * inside:.0f} % inside {others_give}"
            found.append(f"{which}: {len(errors)} rows, {said}")
    return found


@cache
def total_miss(stack: str) -> float | None:
    """The margin of the device total from the rows of one shipped stack alone, as a share of the
    prediction; None if no row of the stack prints it."""
    found: Errors = defaultdict(list)
    for row in out_of_source():
        if stack_of(row) == stack and row["peak_kind"] == ABOUT and row[f"pred_{PEAK}"]:
            found[row["source"]].append(-(log_error(row, PEAK) or 0.0))
    return math.expm1(quantile(_above(found))) if found else None


def total_is_checked(problem: Problem) -> bool:
    """Whether the published device totals of the problem's stack are within MOST_MISS."""
    miss = total_miss(published_stack(problem))
    return miss is not None and miss <= MOST_MISS


def trains_in(problem: Problem) -> str:
    """`weights` if the problem trains all weights, `adapters` if it trains a part."""
    return trained_by(whole=not problem.workload.partly)


def in_words(quantity: PeakKind = ABOUT, trains: str = trained_by(whole=True)) -> str:
    """The margin of a quantity, and the rows that it comes from."""
    width, errors = widest(lines_of_bytes(trains), quantity)
    rows, sources = sum(map(len, errors.values())), len(errors)
    learnt = f"{rows} rows of {sources} source{'s' * (sources != 1)}"
    return f"+{100 * math.expm1(width):.1f} % ({learnt})"


def about(problem: Problem) -> tuple[str, ...]:
    """A sentence on the quantity of the verdict, or why only allocated bytes are checked; none for
    a CPU."""
    if problem.cluster.generation == CPU:
        return ()
    wide, stack = f"margin {in_words(ABOUT, trains_in(problem))}", problem.system.name
    miss = total_miss(published_stack(problem))
    if total_is_checked(problem):
        return (f"the verdict is about the device total, as nvidia-smi shows it; {wide}",)
    why = f"no device total of stack {stack} is published"
    if miss is not None:
        why = f"published device totals of stack {stack} lie up to {100 * miss:.0f} % above ours"
    return (f"allocated only: {why}; the verdict takes our device total; {wide}",)


RESERVE = 0.0915397313357064
"""The part of the device total, as a logarithm, that tuned plans leave free: the margin of
2026-11-28, under which the committed searches were made.  It follows the margin when they are made
again."""


def left_free() -> str:
    """RESERVE as a percentage of the predicted device total, in words."""
    return f"{100 * math.expm1(RESERVE):.1f} %"


def reserve_bytes(room_bytes: int) -> int:
    """Device bytes to leave free so that a plan still fits if its device total is exp(RESERVE)
    times the predicted one; `room_bytes`: as in Problem."""
    return math.ceil(room_bytes * -math.expm1(-RESERVE))


# Why: docs/decisions/advise.md, Is the reserve only a warning?
def leaving_reserve(problem: Problem) -> Problem:
    """The problem whose tuned plans leave `reserve_bytes` of the device free."""
    return dataclasses.replace(problem, reserve_bytes=reserve_bytes(problem.room_bytes))


def fit_of(problem: Problem, headroom_bytes: float) -> Fit:
    """The word of `fits_word` for a plan that leaves `headroom_bytes`."""
    return fits_word(headroom_bytes, problem.room_bytes, unknown_bytes(problem))


def fits_word(headroom_bytes: float, room_bytes: float, unknown: int = 0) -> Fit:
    """`yes`, `tight` (the headroom is below what tuned plans leave free, or below `unknown`, the
    bytes that the job may need and that no prediction includes), or `no`."""
    if headroom_bytes < 0:
        return "no"
    need = (room_bytes - headroom_bytes) * math.exp(RESERVE)
    return "tight" if need > room_bytes or headroom_bytes < unknown else "yes"
