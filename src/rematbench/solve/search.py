"""One-dimensional searches on a grid: few evaluations, the same answer on every machine."""

from collections.abc import Callable


def smallest_feasible(margin: Callable[[int], float], top: int) -> int | None:
    """The smallest integer in [0, top] whose margin is not negative; None if even `top` fails.

    `margin` should not decrease.  Interpolates between the bracket's ends (the margin is nearly
    linear where it matters) and falls back to halving, so 4 to 7 evaluations are typical.
    """
    low, high = 0, top
    low_margin = margin(low)
    if low_margin >= 0:
        return low
    high_margin = margin(high)
    if high_margin < 0:
        return None
    halve = False
    while high - low > 1:
        guess = low + round((high - low) * -low_margin / (high_margin - low_margin))
        middle = (low + high) // 2 if halve else min(max(guess, low + 1), high - 1)
        value = margin(middle)
        width = high - low
        if value < 0:
            low, low_margin = middle, value
        else:
            high, high_margin = middle, value
        halve = not halve and high - low > width // 2
    return high
