"""Allocator retries: torch's rule, a later training step, and where they are said."""

import json

import msgspec
import pytest

from rematbench.cli.compare import retry_lines
from rematbench.cli.show import FRAGMENTS, UNTIMED, retried
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.allocator import MIB
from rematbench.engine.program.replay import replay
from rematbench.evaluate.evaluation import evaluate_program, fullest_rank
from rematbench.evaluate.evaluator import SINGLE_EVALUATOR
from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import Result, evaluate_plan
from rematbench.evaluate.verdict import Retries, judge, retries
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Layout
from rematbench.plugins.discover import discover
from rematbench.problem import Problem
from rematbench.worlds.records.record import make_record
from tests.engine.test_allocator import FRAGMENTED, run, sequence
from tests.typed import typed

METHOD = "full_recompute"
LAYOUT = Layout(tp=2, pp=4, global_batch=8)
JOB = {"model": "llama3-8b", "cluster": "h100-80gb", "system": "megatron-core", "seq_len": 8192}
ROOM, FAILS, AMPLE = 26_870_824_384, 26_970_440_384, 27_743_440_384
"""Usable bytes at which two blocks of each micro-batch find room only after a retry, at which the
second such retry finds none, after the peak (its free bytes lie in segments that are in use),
and where none is needed; the plan allocates 26,766,016,512 bytes and would reserve
27,245,150,208."""


def given(usable_bytes: int) -> Problem:
    whole = make_problem(Job.at(LAYOUT, **JOB))
    hbm_bytes = whole.cluster.hbm_bytes - whole.usable_bytes + usable_bytes
    return make_problem(Job.at(LAYOUT, **JOB, hbm_bytes=hbm_bytes))


def ran(problem: Problem) -> Result:
    method = discover(()).resolve(METHOD, None, problem)
    return evaluate_plan(problem, method.plan(problem))


def words(problem: Problem, *more: str) -> list[str]:
    typed_in = {
        "gpus": 8,
        "tp": 2,
        "pp": 4,
        "global-batch": 8,
        "hbm-bytes": problem.cluster.hbm_bytes,
    }
    job = {key.replace("_", "-"): value for key, value in JOB.items()} | typed_in
    return [*(f"--{key}={value}" for key, value in job.items()), *more]


def test_a_retry_is_a_failed_malloc_that_gave_segments_back() -> None:
    assert run(*FRAGMENTED).retries == 0
    assert run(*FRAGMENTED, capacity=80 * MIB).retries == 0
    assert run(*FRAGMENTED, capacity=60 * MIB).retries == 1
    failed = run(*FRAGMENTED, capacity=39 * MIB)
    assert (failed.retries, failed.oom_at) == (1, 1)


def test_a_later_step_finds_what_the_first_left() -> None:
    """One segment of 40 MiB serves x and y, then z."""
    step = sequence(*FRAGMENTED, "-z")
    passes = [replay(step, (), 60 * MIB, passes=count).retries for count in (1, 2, 3)]
    assert passes == [1, 0, 0]


def test_two_pools_take_turns() -> None:
    """20 MiB of small blocks and one of 50 do not fit into 60: each sends the other's away."""
    small = [f"s{number}={MIB}" for number in range(20)]
    words = [*small, *(f"-s{number}" for number in range(20)), f"x={50 * MIB}", "-x"]
    passes = [replay(sequence(*words), (), 60 * MIB, passes=count).retries for count in (1, 2, 3)]
    assert passes == [1, 2, 2]


@pytest.mark.parametrize(
    ("usable_bytes", "found"), [(ROOM, Retries(per_step=16)), (AMPLE, Retries())]
)
def test_a_plan_near_the_limit(usable_bytes: int, found: Retries) -> None:
    """Counted where the verdict needed them, and the record has the number; the verdict is what it
    was: by reserved bytes."""
    problem = given(usable_bytes)
    outcome = ran(problem)
    assert outcome.status == "ok"
    assert outcome.plan is not None
    assert outcome.evaluation.pressed == (found != Retries())
    assert outcome.verdict == judge(problem, outcome.evaluation)
    assert retries(problem, outcome.plan, outcome.evaluation) == found
    method = discover(()).resolve(METHOD, None, problem)
    assert make_record(outcome, method).allocator_retries == found


def test_a_retry_that_fails_after_the_peak_is_out_of_memory() -> None:
    problem = given(FAILS)
    outcome = ran(problem)
    assert outcome.status == "oom"
    assert outcome.plan is not None
    lowered = SINGLE_EVALUATOR.lowered(problem, outcome.plan)
    number = fullest_rank(lowered.ranks)
    actions, held = lowered.program.ranks[number], lowered.ranks[number]
    near = 2 * held.peak_step + 1
    failed = [
        replay(actions, held.blocks(None), problem.usable_bytes, num_steps=steps).oom_at
        for steps in (near, None)
    ]
    assert failed[0] is None
    assert failed[1] is not None
    assert failed[1] >= near


def test_what_was_not_modelled_is_not_said_to_need_none() -> None:
    problem = given(AMPLE)
    plan = problem.base_plan
    bare = evaluate_program(problem, plan, lower(plan, problem))
    assert retries(problem, plan, bare) is None
    method = discover(()).resolve(METHOD, None, problem)
    none = msgspec.structs.replace(evaluate_plan(problem, plan), evaluation=None)
    assert make_record(none, method).allocator_retries is None


def test_simulate_says_them() -> None:
    text = typed("simulate", METHOD, *words(given(ROOM))).out
    assert f"16 allocator retries a step ({UNTIMED})" in text
    (line,) = retried(Retries(per_step=2, fails=True))
    assert "2 allocator retries in a step, and the last retry fails" in line
    assert "retries" not in typed("simulate", METHOD, *words(given(AMPLE))).out
    answer = json.loads(typed("simulate", METHOD, *words(given(ROOM), "--json")).out)
    assert answer["allocator_retries"] == {"per_step": 16, "fails": False}


def test_compare_says_them() -> None:
    asked = ["--only", METHOD, "--only", "memo"]
    text = typed("compare", *words(given(ROOM), *asked)).out
    assert f"allocator retries a step ({UNTIMED}): {METHOD} 16" in text
    failing = msgspec.structs.replace(
        ran(given(AMPLE)), method=METHOD, retries=Retries(per_step=2, fails=True)
    )
    (line,) = retry_lines([failing])
    assert line == f"{FRAGMENTS}: {METHOD}"
    rows = json.loads(typed("compare", *words(given(ROOM), *asked, "--json")).out)["rows"]
    tried = {row["name"]: (row["allocator_retries"], row["allocator_fails"]) for row in rows}
    assert tried[METHOD] == (16, False)
    assert {value for name, value in tried.items() if name != METHOD} == {(None, None)}
