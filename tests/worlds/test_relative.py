"""Errors beside what may be zero."""

import math

from rematbench.worlds.records.measured import relative


def test_nothing_is_divided_by_zero() -> None:
    assert relative(0.5, 2.0) == 0.25
    assert relative(0.0, 0.0) == 0.0
    assert relative(1e-9, 0.0) == math.inf
    assert not relative(math.nan, 0.0) < 1.0
