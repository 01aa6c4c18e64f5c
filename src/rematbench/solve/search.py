"""One-dimensional searches on a grid: few evaluations, the same answer on every machine."""

from collections.abc import Callable, Iterator
from math import inf

NARROW = 8
"""Width of a bracket below which halving takes no more evaluations than aiming."""


def smallest_feasible(margin: Callable[[int], float], top: int) -> int | None:
    """The smallest integer in [0, top] whose margin is not negative; None if the margin at `top`
    is.

    The margin should not decrease; where it does (allocator fragmentation), the answer is a point
    whose left neighbour fails. Nearly linear margins take 6 to 9 evaluations: from the end of the
    bracket whose margin is nearer to zero, the search aims just beyond the root along the mean
    slope.
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
    """The middle of a bracket; None where no integer is inside."""
    return (low + high) // 2 if high - low > 1 else None


def twice(value: int) -> int:
    """A value twice as far."""
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
    """The brackets (low, high) of the value from which `holds` is true, one after each call of it.

    `holds` must be false at `low` and change once. With `further` (`twice`, say) `high` is asked
    first, and while `holds` is false there the bracket moves up to (high, further(high)); the
    search ends where `holds` is false at `most` or above. Without `further`, `holds` must be true
    at `high`. Then the bracket shrinks to one side of `between`, until that is None.
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
    at `low`, true at `high`, and change once between them; it is called at neither end."""
    *_, (_, found) = (low, high), *brackets(holds, low, high)
    return found
