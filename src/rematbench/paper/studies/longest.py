"""The longest sequence that fits, in multiples of a granularity, for tables of claims."""

from collections.abc import Callable

from msgspec import Struct

from rematbench.evaluate.result import Result, evaluate_method
from rematbench.inputs.layout import LayoutError
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.solve.search import brackets, middle

Factory = Callable[[int], Problem]
"""Makes the problem at a sequence length; raises LayoutError where the layout does not allow it."""


class Longest(Struct, frozen=True, kw_only=True):
    """The longest sequence that fits, in tokens (0: none fits), and the peak at that length.
    `fails_at` is the next longer length, which does not fit; `binds` names the memory that is too
    small at that length.  A length between `fails_at` and `never_from` may still fit, because an
    allocator wastes less at some lengths and pieces change in number; from `never_from` on, live
    bytes alone do not fit, by the line through the peaks of the two longest lengths."""

    seq_len: int
    fails_at: int
    never_from: int
    binds: str
    peak_device_bytes: int
    evaluations: int


def longest_sequence(
    factory: Factory,
    method: Composition,
    *,
    granularity: int = 1024,
    limit: int = 1 << 24,
) -> Longest:
    """Bracket the longest fitting length, then narrow the bracket.

    Allocated bytes are nearly linear in the length, so the next length is the length at which a
    line through the computed peaks reaches the device's capacity. Every third length is the middle
    of the bracket. Reserved bytes may fall again beyond the bracket (`never_from`).

    A sequence fails if a device or a host is out of memory, or if the method or the layout refuses
    it.
    """
    tried: dict[int, Result] = {}
    refused: dict[int, str] = {}

    def fails(units: int) -> bool:
        try:
            problem = factory(units * granularity)
        except LayoutError as error:
            refused[units] = str(error)
            return True
        tried[units] = evaluate_method(problem, method)
        return not tried[units].fits

    def further(units: int) -> int:
        return _further(tried, units, last)

    def between(low: int, high: int) -> int | None:
        every_third = (len(tried) + len(refused)) % 3 == 0
        return middle(low, high) if every_third or high - low <= 1 else _between(tried, low, high)

    last = max(1, limit // granularity)
    *_, (low, high) = brackets(fails, 0, 1, further=further, most=last, between=between)
    refusal = refused.get(high, "the limit of the search")
    best = tried[low].evaluation if low else None
    live = None if high in refused else _crossing(tried, *sorted({0, 1, *tried})[-2:])
    return Longest(
        seq_len=low * granularity,
        fails_at=high * granularity,
        never_from=max(high, 1 + (live or 0)) * granularity,
        binds=tried[high].reason if high in tried else refusal,
        peak_device_bytes=max(best.peak_device_bytes) if best else 0,
        evaluations=len(tried),
    )


def _further(tried: dict[int, Result], units: int, last: int) -> int:
    """The next length to try above a length that fits: twice this length, or, if longer, just
    beyond the length at which the peaks of the last two lengths meet the device. The limit of the
    search is tried once before any length beyond it."""
    before = max((known for known in tried if known < units), default=0)
    guess = _crossing(tried, before, units) if before else None
    further = 2 * units if guess is None else min(max(2 * units, guess + 1), 16 * units)
    return further if units == last else min(further, last)


def _between(tried: dict[int, Result], low: int, high: int) -> int:
    """The next length to try inside a bracket. That is where the peaks meet the device, or a little
    below the upper end if an allocator's waste has already moved the upper end below that point."""
    guess = _crossing(tried, low, high)
    if guess is None:
        return (low + high) // 2
    if guess >= high - 1:
        return high - max(1, (high - low) // 8)
    return max(low + 1, guess)


def _crossing(tried: dict[int, Result], low: int, high: int) -> int | None:
    """The last whole length before the line through two peaks meets the device. None if a peak is
    unknown or the second peak is not the higher one."""
    rooms = [_room(tried.get(units)) for units in (low, high)]
    if rooms[0] is None or rooms[1] is None or rooms[1] >= rooms[0]:
        return None
    return low + int(rooms[0] * (high - low) // (rooms[0] - rooms[1]))


def _room(result: Result | None) -> int | None:
    """Usable device bytes less allocated bytes (negative: bytes missing); None if unknown."""
    if result is None or result.evaluation is None:
        return None
    return result.problem.usable_bytes - max(result.evaluation.peak_device_bytes)
