"""The twin law for every file of methods/, with settings under which each does what it promises."""

import dataclasses
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.program.ledger import issue_order, live_bytes, pool_bytes
from rematbench.engine.program.program import Block, Program
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import CheckError, check
from rematbench.plan import Plan, Unsupported
from rematbench.problem import Problem
from rematbench.solve.relocate import Relocation
from tests.engine.twin.interpreter import EARLY, interpret
from tests.problems import all_methods, layers, problem
from tests.strategies import problems

REGISTRY = all_methods()
ROOT = Path(__file__).resolve().parents[2]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "global_batch": 2},
    "1f1b": {"tp": 2, "pp": 2, "global_batch": 3},
    "interleaved": {"tp": 2, "pp": 3, "vpp": 2, "global_batch": 6},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "memo": {"alpha": 0.5},
    "mst": {"mlp_chunks": 3, "head_chunks": 2},
    "pp_offload": {"alpha": 0.5, "granularity": 256, "min_bytes": 512},
}
"""Thresholds that fit kilobyte tensors; the others' defaults do something there already."""
TIGHT = ("lynx_heu", "lynx_opt")
MOVES = {"memo", "pp_offload"}
REBUILDS = {"memo", "mst", "full_recompute", "balanced_checkpointing", *TIGHT}


@cache
def of(name: str, layout: str) -> tuple[Problem, Plan]:
    """A method on a small problem (eighteen layers), tight where it acts only then.  Every method
    plans for the interleaved layout."""
    made = problem(model=layers(18), seq_len=64, **LAYOUTS[layout])
    made = dataclasses.replace(made, evaluator=evaluate)
    if name in TIGHT:
        made = tight(made)
    plan = REGISTRY.resolve(name, SETTINGS.get(name, {})).plan(made)
    if isinstance(plan, Unsupported) and layout != "interleaved":
        pytest.skip(plan.reason)
    assert isinstance(plan, Plan), plan
    return made, plan


def tight(made: Problem) -> Problem:
    """The problem on a device with half the room that keeping everything needs beyond the least."""
    lean = made.cost.peak_bytes(Relocation(made, made.base_plan, exact=False).lean(made.base_plan))
    usable = (lean + made.cost.peak_bytes(made.base_plan)) // 2
    cluster = replace(made.cluster, hbm_bytes=usable + made.non_torch_bytes)
    return dataclasses.replace(made, cluster=cluster, _memo={})


def keeping(made: Problem, plan: Plan) -> Program:
    """The same partition and pieces with everything kept: what gradients must be computed from."""
    kept = replace(plan, rules=(), transfers=made.base_plan.transfers)
    return lower(kept, made)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", REGISTRY.methods)
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


def without_first(program: Program, kind: Kind) -> Program:
    """Drop the first action of a kind from the first rank that has one (mutation)."""
    for rank, own in enumerate(program.ranks):
        for number, block in enumerate(own.blocks):
            at = next((i for i, action in enumerate(block.actions) if action.kind is kind), None)
            if at is None:
                continue
            shorter = Block(block.label, block.actions[:at] + block.actions[at + 1 :])
            blocks = (*own.blocks[:number], shorter, *own.blocks[number + 1 :])
            changed = replace(own, blocks=blocks)
            return Program(ranks=(*program.ranks[:rank], changed, *program.ranks[rank + 1 :]))
    raise AssertionError(f"no action of kind {kind} to drop")


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, Kind.RECOMPUTE) for name in sorted(REBUILDS)]
    + [(name, Kind.H2D) for name in sorted(MOVES)],
)
def test_a_method_that_skips_one_step_is_caught(name: str, kind: Kind) -> None:
    """Forget one rebuilt tensor, or one copy back: the checker sees a tensor that is not there."""
    made, plan = of(name, "interleaved")
    program = lower(plan, made)
    check(program)
    with pytest.raises(CheckError):
        check(without_first(program, kind))


@pytest.mark.parametrize("name", ["lynx_opt", "memo"])
def test_solvers_are_deterministic(name: str) -> None:
    """Equal problems, built anew, give equal plans: MILPs stop by nodes and gap, never by time."""
    plans = [of.__wrapped__(name, "1f1b")[1] for _ in range(2)]
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


@settings(
    max_examples=settings.default.max_examples // 4,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
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
