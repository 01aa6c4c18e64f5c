"""Quantiles of errors over sources of equal weight."""

from collections.abc import Sequence

LEVEL = 0.8
"""Share of published rows that a band or a margin should contain."""

Errors = dict[str, list[float]]
"""Absolute log errors by source."""


# Why: docs/decisions/evidence.md, Do rows weigh the same?
def quantile(errors: Errors, level: float = LEVEL) -> float:
    """Weighted quantile of errors: each source has weight 1, divided equally among its values.

    The quantile is linear between the middles of the values' weights.  For n values of weight 1 it
    is the value of rank level (n + 1/3) + 1/3, which is median-unbiased for every distribution
    (Hyndman and Fan 1996, The American Statistician 50(4), type 8, their recommendation).  Hazen's
    rule (type 5), rank level n + 1/2, takes a lower value and covers fewer rows.
    """
    values = sorted((value, 1.0 / len(some)) for some in errors.values() for value in some)
    wanted, seen, last = level * len(errors) + (level - 0.5) / 3.0, 0.0, (0.0, values[0][0])
    for value, weight in values:
        middle = seen + weight / 2.0
        if middle >= wanted:
            return last[1] + (value - last[1]) * (wanted - last[0]) / (middle - last[0])
        seen, last = seen + weight, (middle, value)
    return values[-1][0]


def source_quantile(errors: Sequence[float]) -> float:
    """Quantile of the errors of one source; each error has weight 1."""
    return quantile({str(row): [error] for row, error in enumerate(errors)})
