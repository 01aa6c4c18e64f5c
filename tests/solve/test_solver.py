"""The solver's answers, and that it writes nothing past Python."""

import numpy as np
import pytest

from rematbench.solve import solver


def knapsack(room: float) -> list[int] | None:
    """Values 3, 2, 2 of weights 3, 2, 2."""
    found = solver.minimum(
        costs=np.array([-3.0, -2.0, -2.0]),
        integrality=np.ones(3, dtype=int),
        rows=[({0: 3.0, 1: 2.0, 2: 2.0}, room), ({0: -3.0, 1: -2.0, 2: -2.0}, 1.0 - room)],
        lower=np.zeros(3),
        upper=np.ones(3),
        max_nodes=100,
        gap=1e-6,
    )
    return None if found is None else [round(value) for value in found]


def test_an_optimum_and_an_impossible_one() -> None:
    assert knapsack(4.0) == [0, 1, 1]
    assert knapsack(40.0) is None


def test_what_the_library_prints_goes_nowhere(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one prints under conditions of its own; a stand-in always does."""

    def loud(**options: object) -> object:
        solver.os.write(1, b"HighsMipSolverData::transformNewIntegerFeasibleSolution\n")
        return type("Result", (), {"x": np.zeros(1)})

    monkeypatch.setattr("scipy.optimize.milp", loud)
    assert knapsack(4.0) == [0]
    solver.os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"
