"""The longest sequence that fits, in multiples of a granularity, for claims tables."""

from collections.abc import Callable

from msgspec import Struct

from rematbench.choose.outcome import Outcome, run_method
from rematbench.plan import Plan
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.spec.layout import LayoutError

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
    """Bracket the longest fitting length, then narrow the bracket; fitting must be monotone in
    length.  Allocated bytes are nearly linear in it, so lengths are tried where a straight line
    through the peaks known so far meets the device, and every third time in the middle.

    A sequence fails if a device or a host is out of memory, or if the method or layout refuses it.
    """
    tried: dict[int, Outcome] = {}

    def fits(units: int) -> bool:
        tried[units] = _attempt(factory, units * granularity, method, reserved)
        return tried[units].status == "ok"

    last = max(1, limit // granularity)
    low, high = 0, 1
    while high <= last and fits(high):
        low, high = high, _further(tried, high, last)
    if high not in tried:
        return _report(tried, low, high, granularity, "the limit of the search")
    while high - low > 1:
        units = (low + high) // 2 if len(tried) % 3 == 0 else _between(tried, low, high)
        low, high = (units, high) if fits(units) else (low, units)
    return _report(tried, low, high, granularity, tried[high].reason)


def _further(tried: dict[int, Outcome], units: int, last: int) -> int:
    """Where to look for a length that fails: twice as far, or just beyond where the peaks of the
    last two lengths meet the device; the limit once before going past it."""
    before = max((known for known in tried if known < units), default=0)
    guess = _crossing(tried, before, units) if before else None
    further = 2 * units if guess is None else min(max(2 * units, guess + 1), 16 * units)
    return further if units == last else min(further, last)


def _between(tried: dict[int, Outcome], low: int, high: int) -> int:
    """A length inside a bracket: where the peaks meet the device, or a little below the upper end
    if an allocator's waste has already moved that end below the meeting point."""
    guess = _crossing(tried, low, high)
    if guess is None:
        return (low + high) // 2
    if guess >= high - 1:
        return high - max(1, (high - low) // 8)
    return max(low + 1, guess)


def _crossing(tried: dict[int, Outcome], low: int, high: int) -> int | None:
    """The last whole length before the line through two peaks meets the device; None if a peak is
    unknown or they do not rise."""
    rooms = [_room(tried.get(units)) for units in (low, high)]
    if rooms[0] is None or rooms[1] is None or rooms[1] >= rooms[0]:
        return None
    return low + int(rooms[0] * (high - low) // (rooms[0] - rooms[1]))


def _room(outcome: Outcome | None) -> int | None:
    """Device bytes less allocated bytes (negative: they do not fit); None if unknown."""
    if outcome is None or outcome.evaluation is None or outcome.verdict is None:
        return None
    found = outcome.evaluation
    return outcome.verdict.headroom_bytes + found.reserved_bytes - max(found.peak_device_bytes)


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
    short = reserved(problem, outcome.plan) - problem.usable_bytes
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
