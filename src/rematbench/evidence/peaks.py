"""Margins of predicted device bytes, each learnt from published rows that print the same quantity.

Three quantities of the fullest GPU: the bytes that torch hands out (allocated), the bytes that its
allocator holds (reserved), and the device total, which is the reserved bytes with the CUDA context
and the communicators (`Problem.room_bytes` less `Problem.usable_bytes`).  A verdict is about the
device total.  A margin is the 80 % quantile of ln(published / predicted), where an overestimate
counts as 0 and every source has weight 1.  A quantity has at least the margin of each of its parts.
Computed sizes and peaks whose quantity the source does not state count nowhere.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import get_args

from rematbench.evaluate.result import Fit
from rematbench.evidence.job_evidence import PEAK, log_error, out_of_source, published_stack
from rematbench.evidence.published.row_cases import stack_of
from rematbench.evidence.published.sheets import PeakKind, Quantity, Row
from rematbench.evidence.quantiles import Errors, quantile
from rematbench.inputs.facts import CPU
from rematbench.problem import Problem

ABOUT: PeakKind = "device"
"""The quantity that verdicts are about."""
MOST_MISS = 0.10
"""Largest share by which published device totals of a stack may exceed the predicted ones; beyond
it a device total is not shown as a prediction."""


def underestimates(rows: Iterable[Row], quantity: PeakKind) -> Errors:
    """ln(published / predicted) of the rows that print a quantity, at least 0, by source."""
    found: Errors = defaultdict(list)
    for row in rows:
        error = log_error(row, PEAK) if row["peak_kind"] == quantity else None
        if error is not None:
            found[row["source"]].append(max(0.0, -error))
    return dict(found)


# Why: docs/decisions/evidence.md, Which rows does the margin of device memory come from?
@cache
def margin(quantity: PeakKind = ABOUT) -> float:
    """The margin of a quantity, as a logarithm."""
    parts = get_args(Quantity)[: get_args(Quantity).index(quantity) + 1]
    return max(quantile(underestimates(out_of_source(), part)) for part in parts)


@cache
def total_miss(stack: str) -> float | None:
    """The margin of the device total from the rows of one shipped stack alone, as a share of the
    prediction; None if no row of the stack prints it."""
    own = (row for row in out_of_source() if stack_of(row) == stack)
    errors = underestimates(own, "device")
    return math.expm1(quantile(errors)) if errors else None


def total_is_checked(problem: Problem) -> bool:
    """Whether the published device totals of the problem's stack are within MOST_MISS."""
    miss = total_miss(published_stack(problem))
    return miss is not None and miss <= MOST_MISS


def in_words(quantity: PeakKind = ABOUT) -> str:
    """The margin of a quantity, and the rows that print it."""
    errors = underestimates(out_of_source(), quantity)
    rows, sources = sum(map(len, errors.values())), len(errors)
    learnt = f"{rows} rows of {sources} source{'s' * (sources != 1)}"
    return f"+{100 * math.expm1(margin(quantity)):.1f} % ({learnt})"


def about(problem: Problem) -> tuple[str, ...]:
    """A sentence on the quantity of the verdict, or why only allocated bytes are checked; none for
    a CPU."""
    if problem.cluster.generation == CPU:
        return ()
    wide, stack = f"margin {in_words()}", problem.system.name
    miss = total_miss(published_stack(problem))
    if total_is_checked(problem):
        return (f"the verdict is about the device total, as nvidia-smi shows it; {wide}",)
    why = f"no device total of stack {stack} is published"
    if miss is not None:
        why = f"published device totals of stack {stack} lie up to {100 * miss:.0f} % above ours"
    return (f"allocated only: {why}; the verdict takes our device total; {wide}",)


def reserve_bytes(room_bytes: int) -> int:
    """Device bytes to leave free so that a plan still fits if its device total is exp(`margin`)
    times the predicted one; `room_bytes`: as in Problem."""
    return math.ceil(room_bytes * -math.expm1(-margin()))


# Why: docs/decisions/advise.md, Is the reserve only a warning?
def leaving_reserve(problem: Problem) -> Problem:
    """The problem whose tuned plans leave `reserve_bytes` of the device free."""
    return dataclasses.replace(problem, reserve_bytes=reserve_bytes(problem.room_bytes))


def fits_word(headroom_bytes: float, room_bytes: float, unknown: int = 0) -> Fit:
    """`yes`, `tight` (the headroom is below the margin of the device total, or below the bytes that
    the job may need and that no prediction has, `unknown`), or `no`."""
    if headroom_bytes < 0:
        return "no"
    need = (room_bytes - headroom_bytes) * math.exp(margin())
    return "tight" if need > room_bytes or headroom_bytes < unknown else "yes"
