"""Storage allocation: no overlaps, never under the live bytes, the MILP never over best fit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import issue_order, pool_bytes
from rematbench.engine.program.program import Program
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.solve import solver
from rematbench.solve.memory_plan import lifetimes, memory_plan
from rematbench.solve.packing import Packing, Tensor, best_fit, live_peak, pack
from tests.problems import layers, plan_of, problem
from tests.strategies import cases

GAP = (Tensor(2, 0, 4), Tensor(1, 0, 2), Tensor(2, 2, 6), Tensor(1, 4, 8), Tensor(3, 6, 8))
"""Five tensors: first come first served fragments, largest first does not."""


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, ...]:
    sizes = st.integers(1, 64)
    starts, spans = st.integers(0, 12), st.integers(1, 8)
    raw = draw(st.lists(st.tuples(sizes, starts, spans), min_size=1, max_size=14))
    return tuple(Tensor(size, start, start + span) for size, start, span in raw)


def overlaps(items: tuple[Tensor, ...], offsets: tuple[int, ...]) -> bool:
    placed = list(zip(items, offsets, strict=True))
    return any(
        a.start < b.end and b.start < a.end and x < y + b.nbytes and y < x + a.nbytes
        for i, (a, x) in enumerate(placed)
        for b, y in placed[i + 1 :]
    )


def peak(items: tuple[Tensor, ...], offsets: tuple[int, ...]) -> int:
    return max(offset + t.nbytes for t, offset in zip(items, offsets, strict=True))


@given(tensors())
def test_packings_never_overlap_and_never_beat_the_live_bytes(items: tuple[Tensor, ...]) -> None:
    found = pack(items)
    assert not overlaps(items, found.offsets)
    assert min(found.offsets) >= 0
    assert found.peak_bytes == peak(items, found.offsets) >= found.lower_bound_bytes
    assert found.lower_bound_bytes == live_peak(items)
    offsets = best_fit(items)
    assert not overlaps(items, offsets)
    assert found.peak_bytes <= peak(items, offsets), "the MILP is never worse than best fit"


def test_the_same_tensors_give_the_same_offsets() -> None:
    first = pack(GAP)
    pack.cache_clear()
    assert pack(GAP) == first


def test_tensors_that_never_meet_share_an_offset() -> None:
    found = pack((Tensor(8, 0, 1), Tensor(8, 1, 2), Tensor(8, 2, 3)))
    assert found == Packing(offsets=(0, 0, 0), peak_bytes=8, lower_bound_bytes=8, solver="best_fit")


def test_nothing_takes_nothing() -> None:
    assert pack(()).peak_bytes == live_peak(()) == 0


def test_the_milp_closes_a_gap_that_best_fit_leaves() -> None:
    """A staircase on which every greedy order of ours wastes a byte or more."""
    items = tuple(
        Tensor(size, start, end)
        for size, start, end in [
            (3, 0, 3), (2, 0, 5), (4, 3, 7), (1, 1, 6), (5, 6, 9), (2, 5, 8), (3, 7, 10), (2, 2, 4)
        ]
    )  # fmt: skip
    assert pack(items).peak_bytes <= pack(items, 0).peak_bytes
    assert pack(items).peak_bytes == pack(items).lower_bound_bytes


# -- plans of programs ------------------------------------------------------------------------


def program(spec: str) -> Program:
    p = problem(model=layers(6), tp=2)
    return lower(plan_of(p, spec), p)


@pytest.mark.parametrize("spec", ["keep_all", "full_recompute", "memo", "memo+mst"])
def test_the_lower_bound_is_the_ledgers_peak_and_the_pools(spec: str) -> None:
    lowered = program(spec)
    (ledger,), (rank,) = issue_order(lowered), lowered.ranks
    plan = memory_plan(rank)
    assert plan.lower_bound_bytes == ledger.device_peak_bytes + pool_bytes(rank)
    assert plan.lower_bound_bytes <= plan.peak_bytes


def test_equal_layers_are_solved_once() -> None:
    for spec in ("keep_all", "full_recompute"):
        rank = program(spec).ranks[0]
        pack.cache_clear()
        memory_plan(rank)
        assert pack.cache_info().misses < len(list(lifetimes(rank))) / 6


@settings(max_examples=settings.default.max_examples // 4)
@given(cases())
def test_any_program_has_a_plan_between_its_live_bytes_and_their_sum(
    case: tuple[Problem, Plan],
) -> None:
    given_problem, plan = case
    lowered = lower(plan, given_problem)
    for rank, ledger in zip(lowered.ranks, issue_order(lowered), strict=True):
        planned = memory_plan(rank)
        assert planned.peak_bytes >= planned.lower_bound_bytes
        assert planned.lower_bound_bytes >= ledger.device_peak_bytes
        assert planned.lower_bound_bytes <= ledger.device_peak_bytes + pool_bytes(rank)


# -- beside the caching allocator -------------------------------------------------------------


# -- the solver's answers, and that it writes nothing past Python ----------------------------------


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
