"""The twin law for every file of methods/, with settings under which each does what it promises."""

import dataclasses
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.program.ledger import issue_order, live_bytes, pool_bytes
from rematbench.engine.program.program import Program
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.plan import Plan, Unsupported
from rematbench.problem import Problem
from tests.engine.twin.interpreter import EARLY, interpret
from tests.problems import all_methods, layers, on, problem, tight
from tests.strategies import problems
from tests.tables import tables

TABLES = tables(__file__)

REGISTRY = all_methods()
ROOT = Path(__file__).resolve().parents[3]
"""Thresholds that fit kilobyte tensors; the others' defaults do something there already."""
TIGHT = ("lynx_heu", "lynx_opt")
ONE_CHUNK = ("zero_bubble", "vocabulary_parallel", "terapipe", "seq1f1b", "sppo")
"""Schedules with one chunk on a rank."""
MOVES = {"memo", "pp_offload", "pipe_offload"}
REBUILDS = {"memo", "mst", "full_recompute", "balanced_checkpointing", *TIGHT}


@cache
def of(name: str, layout: str) -> tuple[Problem, Plan]:
    """A method on a small problem (eighteen layers), tight where it acts only then.  Every method
    plans for the interleaved layout, but for those of ONE_CHUNK."""
    made = problem(model=layers(18), seq_len=64, **TABLES["layouts"][layout])
    made = dataclasses.replace(made, evaluator=evaluate)
    if REGISTRY.methods[name].moves_states:
        made = on(made, host_update_parameters_per_s=1e9)
    if name in TIGHT:
        made = tight(made, 0.5)
    plan = REGISTRY.resolve(name, TABLES["settings"].get(name, {})).plan(made)
    anywhere = layout == "interleaved" and name not in ONE_CHUNK
    if isinstance(plan, Unsupported) and not anywhere:
        pytest.skip(plan.reason)
    assert isinstance(plan, Plan), plan
    return made, plan


def keeping(made: Problem, plan: Plan) -> Program:
    """The same partition and pieces with everything kept: what gradients must be computed from."""
    kept = replace(plan, rules=(), transfers=made.base_plan.transfers)
    return lower(kept, made)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *(("tp" if name in ONE_CHUNK else "interleaved", name) for name in REGISTRY.methods),
        *(
            pytest.param(layout, name, marks=pytest.mark.full)
            for layout in ("tp", "1f1b")
            for name in REGISTRY.methods
            if layout == "1f1b" or name not in ONE_CHUNK
        ),
    ],
)
def test_memory_equals_the_ledger_after_every_action(name: str, layout: str) -> None:
    made, plan = of(name, layout)
    program = lower(plan, made)
    check(program)
    ranks = interpret(program)
    for twin, rank, ledger in zip(ranks, program.ranks, issue_order(program), strict=True):
        assert twin.after == list(live_bytes(rank.actions()))
        assert twin.after[-1] == (0, 0)
        assert twin.slot_bytes() == pool_bytes(rank)
        assert twin.peak == ledger.device_peak_bytes
    expected = [rank.gradients for rank in interpret(keeping(made, plan))]
    assert [rank.gradients for rank in ranks] == expected
    assert [rank.gradients for rank in interpret(program, EARLY)] == expected


@pytest.mark.parametrize("name", sorted(MOVES | REBUILDS))
def test_a_method_does_what_it_promises(name: str) -> None:
    """Bytes go to the host, and tensors are rebuilt, where the method says so; else none are."""
    made, plan = of(name, "interleaved")
    ranks = interpret(lower(plan, made))
    moved = [sum(rank.moved[kind] for rank in ranks) for kind in (Kind.D2H, Kind.RECOMPUTE)]
    assert (moved[0] > 0) == (name in MOVES)
    assert (moved[1] > 0) == (name in REBUILDS)


@pytest.mark.parametrize("name", ["lynx_opt", "memo"])
def test_solvers_are_deterministic(name: str) -> None:
    """Equal problems, built anew, give equal plans: MILPs stop by nodes and gap, never by time."""
    plans = [make(name, "1f1b")[1] for make in (of, of.__wrapped__)]
    assert plans[0] == plans[1]
    assert plans[0].rules


SOLVE = """
import sys
from functools import cache
sys.path.insert(0, sys.argv[1])
import msgspec
from rematbench.solve.packing import Tensor, pack
from tests.engine.twin.test_methods import of
sys.stdout.buffer.write(msgspec.json.encode(of("lynx_opt", "1f1b")[1], order="deterministic"))
sys.stdout.write(str(pack(tuple(Tensor(3 + i % 5, i % 7, i % 7 + 2 + i % 4) for i in range(24)))))
"""


@pytest.mark.full
def test_milps_do_not_depend_on_the_process() -> None:
    """Another order of hashes, as another Python has, gives the same plan and packing."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SOLVE, str(ROOT)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert b"rules" in outputs[0]


@settings(max_examples=settings.default.max_examples // 4)
@given(problems(), st.lists(st.sampled_from(sorted(REGISTRY.methods)), min_size=1, max_size=2))
def test_methods_on_any_problem_plan_soundly_or_say_why(made: Problem, names: list[str]) -> None:
    """Any layout, stack and model; alone or composed."""
    made = dataclasses.replace(made, evaluator=evaluate)
    if len(set(names)) < len(names):
        names = names[:1]
    plan = REGISTRY.resolve("+".join(names)).plan(made)
    if isinstance(plan, Unsupported):
        assert plan.reason
        return
    program = lower(plan, made)
    check(program)
    ranks = interpret(program)
    expected = [rank.gradients for rank in interpret(keeping(made, plan))]
    assert [rank.gradients for rank in ranks] == expected
    for twin, rank in zip(ranks, program.ranks, strict=True):
        assert twin.after == list(live_bytes(rank.actions()))
