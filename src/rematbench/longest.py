"""The longest sequence that fits: bisection over multiples of a granularity, for claims tables."""

from collections.abc import Callable

from msgspec import Struct

from rematbench.discover import Composition
from rematbench.layout import LayoutError
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.suite import Outcome, run_method

Factory = Callable[[int], Problem]
"""The problem at a sequence length (raises LayoutError where the layout does not allow it)."""
Reserved = Callable[[Problem, Plan], int]
"""Device bytes an allocator reserves for a plan, where that is to decide instead of the ledger."""


class Longest(Struct, frozen=True, kw_only=True):
    """The longest sequence that fits (0: none does), the next one tried that does not and what it
    is short of, and the peak at the longest."""

    seq_len: int
    fails_at: int
    binds: str
    peak_device_bytes: int
    evaluations: int


def longest_sequence(
    factory: Factory,
    method: Composition,
    *,
    granularity: int = 1024,
    limit: int = 1 << 24,
    reserved: Reserved | None = None,
) -> Longest:
    """Double until a sequence fails, then halve the bracket; fitting must be monotone in length.

    A sequence fails if a device or a host is out of memory, or if the method or layout refuses it.
    """
    tried: dict[int, Outcome] = {}

    def fits(units: int) -> bool:
        tried[units] = _attempt(factory, units * granularity, method, reserved)
        return tried[units].status == "ok"

    low, high = 0, 1
    while high * granularity <= limit and fits(high):
        low, high = high, 2 * high
    if high not in tried:
        return _report(tried, low, high, granularity, "the limit of the search")
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return _report(tried, low, high, granularity, tried[high].reason)


def _attempt(
    factory: Factory, seq_len: int, method: Composition, reserved: Reserved | None
) -> Outcome:
    try:
        problem = factory(seq_len)
    except LayoutError as error:
        return Outcome(status="failed", reason=str(error))
    outcome = run_method(problem, method)
    if reserved is None or outcome.status != "ok" or outcome.plan is None:
        return outcome
    short = reserved(problem, outcome.plan) - problem.cluster.usable_bytes
    if short <= 0:
        return outcome
    reason = f"allocator reserves {short / 2**30:.2f} GiB more than the device has"
    return Outcome(status="oom", reason=reason)


def _report(
    tried: dict[int, Outcome], low: int, high: int, granularity: int, binds: str
) -> Longest:
    best = tried[low].evaluation if low else None
    return Longest(
        seq_len=low * granularity,
        fails_at=high * granularity,
        binds=binds,
        peak_device_bytes=max(best.peak_device_bytes) if best else 0,
        evaluations=len(tried),
    )
