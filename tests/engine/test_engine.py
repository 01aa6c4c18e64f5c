"""Any legal plan on any legal layout is sound, loses no byte, and is timed alike at both levels."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower, rank_orders
from rematbench.engine.program.action import Action
from rematbench.engine.program.ledger import issue_order, live_bytes, pool_bytes
from rematbench.engine.program.program import Program
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.proof import check
from rematbench.plan import ByteBudget, Plan, Rule, Select
from rematbench.problem import Problem
from tests.engine.test_schedule import in_flight
from tests.engine.twin.interpreter import EARLY, LATE, Rank, interpret
from tests.problems import BALANCED, layers, problem, transfers
from tests.program_text import parse_program
from tests.strategies import SYSTEMS, cases

SLOW = settings(max_examples=settings.default.max_examples * 2 // 5)
Case = tuple[Problem, Plan]


def program_of(case: Case) -> Program:
    return lower(case[1], case[0])


def held_to_the_ledger(program: Program, at_issue: frozenset[str] = LATE) -> list[Rank]:
    """The ranks that the interpreter has run, with the ledger's bytes after every action."""
    ranks = interpret(program, at_issue)
    for twin, rank, ledger in zip(ranks, program.ranks, issue_order(program), strict=True):
        assert twin.after == list(live_bytes(rank.actions()))
        assert twin.after[-1] == (0, 0)
        assert twin.peak == ledger.device_peak_bytes
        assert twin.slot_bytes() == pool_bytes(rank)
    return ranks


@SLOW
@given(cases())
def test_never_deadlocks_leaks_or_loses_bytes(case: Case) -> None:
    """check() is clean, memory equals the ledger after every action, all of it is given back, and
    every gradient reads the bytes it reads when everything is kept."""
    given_problem, plan = case
    program = program_of(case)
    check(program)
    keep_all = replace(plan, rules=(), transfers=given_problem.base_plan.transfers)
    expected = [rank.gradients for rank in interpret(lower(keep_all, given_problem))]
    for at_issue in (LATE, EARLY):
        ranks = held_to_the_ledger(program, at_issue)
        assert [rank.gradients for rank in ranks] == expected


@SLOW
@given(cases(), st.integers(0, 3))
def test_chunk_level_equals_op_level(case: Case, shape: int) -> None:
    """With the machine's costs and with costs under which copies or sends dominate."""
    program = program_of(case)
    real = action_seconds(case[0])

    def skewed(action: Action, rank: int) -> float:
        copies = action.stream in ("d2h", "h2d", "pp_send")
        return real(action, rank) * (100.0**shape if copies else 1.0)

    op, chunk = simulate(program, skewed), simulate_chunks(program, skewed)
    assert chunk.step_s == pytest.approx(op.step_s, rel=1e-9)
    assert chunk.rank_end_s == pytest.approx(op.rank_end_s, rel=1e-9)
    assert chunk.stream_busy_s == op.stream_busy_s
    busiest = max(max(streams) for streams in op.stream_busy_s)
    assert op.step_s >= busiest * (1 - 1e-12)


@SLOW
@given(cases())
def test_text_is_the_program(case: Case) -> None:
    program = program_of(case)
    parsed = parse_program(program.text())
    assert parsed.text() == program.text()
    assert [list(r.actions()) for r in parsed.ranks] == [list(r.actions()) for r in program.ranks]
    real = action_seconds(case[0])
    assert simulate(parsed, real).step_s == simulate(program, real).step_s
    assert issue_order(parsed) == issue_order(program)


@st.composite
def deep_pipelines(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """Layouts whose first ranks hold more than four chunk-micro-batches."""
    pp = draw(st.integers(1, 4))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    m = pp * draw(st.integers(1, 3)) if vpp > 1 else draw(st.integers(5, 9))
    sizes: dict[str, Any] = {"tp": draw(st.sampled_from([1, 2])), "pp": pp, "vpp": vpp}
    drawn = problem(
        model=layers(pp * vpp * draw(st.integers(1, 2))),
        system=draw(st.sampled_from(SYSTEMS)),
        global_batch=m,
        **sizes,
    )
    plan = drawn.base_plan.with_rules(*draw(st.sampled_from([(), (BALANCED,)])))
    if vpp == 1:
        plan = replace(plan, schedule=draw(st.sampled_from(["gpipe", "1f1b"])))
    return drawn, transfers(plan, granularity=draw(st.sampled_from(["chunk", "layer"])))


@SLOW
@given(deep_pipelines())
def test_offloading_more_never_raises_a_deep_ranks_peak(case: Case) -> None:
    """(1 - alpha) of what is in flight against four copies in motion: down from five on."""
    given_problem, plan = case
    peaks = []
    for tenths in range(0, 11, 2):
        budget = ByteBudget(alpha=tenths / 10, granularity=256, min_bytes=512)
        program = lower(plan.with_rules(Rule(Select(kept=True), budget)), given_problem)
        peaks.append([ledger.device_peak_bytes for ledger in issue_order(program)])
    for rank, order in enumerate(rank_orders(plan, given_problem)):
        if in_flight(order) > 4:
            assert all(after[rank] <= before[rank] for before, after in pairwise(peaks))
