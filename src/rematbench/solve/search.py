"""One-dimensional searches on a grid: few evaluations, the same answer on every machine."""

from collections.abc import Callable

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


def first_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest integer in (low, high] where `holds` is true, by halving. `holds` must be false
    at `low`, true at `high`, and change once between them; it is called at neither end."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
