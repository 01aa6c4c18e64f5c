"""One-dimensional searches on integers with few evaluations."""

from collections.abc import Callable, Iterator
from math import inf

NARROW = 8
"""Width of a bracket below which the search halves it instead of extrapolating."""


def smallest_feasible(margin: Callable[[int], float], top: int) -> int | None:
    """The smallest integer in [0, top] whose margin is not negative; None if the margin at `top`
    is negative.

    The margin should not decrease; if it does (allocator fragmentation), the result is an integer
    whose left neighbour fails.  Nearly linear margins take 6 to 9 evaluations, because the search
    extrapolates along the mean slope to just beyond the root, from the end of the bracket whose
    margin is nearer to zero.
    """
    low, high = 0, top
    low_margin, high_margin = margin(low), 0.0
    if low_margin >= 0:
        return low
    high_margin = margin(high)
    if high_margin < 0:
        return None
    slope = (high_margin - low_margin) / top
    beyond = 1
    while high - low > 1:
        from_high = high_margin <= -low_margin
        if high - low <= NARROW:
            middle = (low + high) // 2
        elif from_high:
            middle = high - int(high_margin / slope) - beyond
        else:
            middle = low - int(low_margin / slope) + beyond
        middle = min(max(middle, low + 1), high - 1)
        value = margin(middle)
        beyond = 1 if from_high == (value < 0) else 2 * beyond
        if value < 0:
            low, low_margin = middle, value
        else:
            high, high_margin = middle, value
    return high


def middle(low: int, high: int) -> int | None:
    return (low + high) // 2 if high - low > 1 else None


def twice(value: int) -> int:
    return 2 * value


def brackets(
    holds: Callable[[int], bool],
    low: int,
    high: int,
    *,
    further: Callable[[int], int] | None = None,
    most: float = inf,
    between: Callable[[int, int], int | None] = middle,
) -> Iterator[tuple[int, int]]:
    """The brackets (low, high) of the value from which `holds` is true, one after each evaluation.

    `holds` must be false at `low` and change once.  Without `further`, `holds` must be true at
    `high`.  With `further` (for example `twice`), the bracket moves up to (high, further(high))
    while `holds(high)` is false; the search ends if `holds` is false at `most` or above.  Then the
    bracket shrinks to one side of `between(low, high)` until that is None.
    """
    if further is not None:
        while not holds(high):
            low, high = high, further(high)
            yield low, high
            if low >= most:
                return
        yield low, high
    while (value := between(low, high)) is not None:
        low, high = (low, value) if holds(value) else (value, high)
        yield low, high


def first_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest integer in (low, high] where `holds` is true, by halving. `holds` must be false
    at `low`, true at `high`, and change once between them; it is not called at the ends."""
    *_, (_, found) = (low, high), *brackets(holds, low, high)
    return found
