"""Blocking launches: the host waits for each kernel, so nothing overlaps on a rank."""

from dataclasses import replace as replaced
from itertools import pairwise
from math import fsum

import pytest
from hypothesis import given

from rematbench.engine.lowering.lower import lower
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import ORDERING, TIMELESS, simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.evaluation import evaluate
from rematbench.inputs.system import with_facts
from rematbench.plan import Plan
from rematbench.problem import Problem
from tests.problems import problem, remade
from tests.strategies import cases


def blocking(made: Problem) -> Problem:
    """The problem on a stack whose launches block."""
    return remade(made, system=with_facts(made.system, launch_blocking=True))


@given(cases())
def test_a_step_is_never_faster_and_both_levels_agree(case: tuple[Problem, Plan]) -> None:
    made, plan = case
    slow = blocking(made)
    program = lower(plan, slow)
    seconds = action_seconds(slow, program)
    step_s = simulate_chunks(program, seconds).step_s
    assert step_s == pytest.approx(simulate(program, seconds).step_s, rel=1e-9)
    free = lower(plan, made)
    assert step_s >= simulate_chunks(free, action_seconds(made, free)).step_s * (1 - 1e-9)


@given(cases())
def test_a_rank_s_actions_do_not_overlap(case: tuple[Problem, Plan]) -> None:
    made, plan = case
    slow = blocking(made)
    program = lower(plan, slow)
    ran = simulate(program, action_seconds(slow, program), record=True)
    for rank in range(program.pp):
        busy = sorted(
            (one.start_s, one.end_s)
            for one in ran.intervals
            if one.rank == rank and one.end_s > one.start_s
        )
        for (_, end), (start, _) in pairwise(busy):
            assert start >= end * (1 - 1e-12)


@pytest.mark.parametrize(
    "system", ["rematbench", "megatron-core", "huggingface-flash", "torchtitan"]
)
def test_on_one_stream_launches_and_kernels_add(system: str) -> None:
    made = blocking(problem(system=system, tp=1, global_batch=3))
    program = lower(made.base_plan, made)
    seconds = action_seconds(made, program)
    (rank,) = program.ranks
    taken = [
        (timing.issue, timing.seconds)
        for action, _, _ in rank.actions()
        if action.kind not in (*TIMELESS, *ORDERING)
        for timing in (seconds.timing(action, 0),)
    ]
    whole = fsum(issue + duration for issue, duration in taken)
    assert simulate_chunks(program, seconds).step_s == pytest.approx(whole, rel=1e-9)
    assert evaluate(made, made.base_plan).step_s == pytest.approx(whole, rel=1e-9)


def test_kernels_beside_a_collective_are_not_slowed() -> None:
    made = problem(system="megatron-core", tp=2, dp=2, global_batch=4)
    assert made.cost.overlap_factor("tp") > 1.0
    assert blocking(made).cost.overlap_factor("tp") == 1.0


def test_bytes_do_not_depend_on_it() -> None:
    made = problem(system="megatron-core", tp=2, pp=2, dp=2, global_batch=8)
    slow = replaced(blocking(made), evaluator=None)
    assert evaluate(made, made.base_plan).ranks == evaluate(slow, slow.base_plan).ranks
