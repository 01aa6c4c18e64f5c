"""The host's clock: it issues a rank's list, leads the device, and never makes a step faster."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace as replaced
from itertools import pairwise
from math import fsum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import GRADIENTS_DOWN, Action, Kind
from rematbench.engine.program.program import Program
from rematbench.engine.program.storage import event_of
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import ORDERING, TIMELESS, Timing, simulate
from rematbench.engine.simulate.seconds import DIRECTION, ActionCosts, action_seconds
from rematbench.evaluate.breakdown import host_wait_s
from rematbench.evaluate.evaluation import evaluate
from rematbench.inputs.constants import Calibration
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_cluster, load_model, load_system
from rematbench.inputs.system import with_facts
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.workload import Workload
from tests.cost_constants import ROUND, instant_hosts
from tests.problems import (
    BALANCED,
    FULL,
    SKELETAL,
    half,
    make_problem,
    plan_of,
    problem,
    remade,
    transfers,
)
from tests.program_text import parse_program
from tests.strategies import cases

LAYOUTS: list[dict[str, Any]] = [
    {"global_batch": 3},
    {"tp": 2, "cp": 2, "pp": 2, "vpp": 2, "dp": 2, "global_batch": 8},
    {"system": "megatron-kwai", "tp": 2, "pp": 4, "global_batch": 6},
    {"system": "torchtitan", "dp": 2, "zero_stage": 3, "global_batch": 6},
]
PLANS = {
    "keep_all": ((), {}),
    "balanced+offload": ((BALANCED, half()), {"before_send_phases": ("warmup", "cooldown")}),
    "skeletal": (SKELETAL, {"granularity": "layer"}),
}
TP_8 = {"model": "gpt-22b", "cluster": "a100-80gb-selene", "system": "megatron-lm"}
PP_4 = {"model": "llama-7b", "cluster": "h800-80gb", "system": "megatron-core"}
VPP_5 = {"model": "llama-65b", "cluster": "h800-80gb", "system": "megatron-kwai"}
ZERO_3 = {"model": "llama-7b", "cluster": "h100-80gb", "system": "torchtitan"}
SYNC = {"model": "gpt-3.6b", "cluster": "a100-vtrain", "system": "megatron-deepspeed"}
CELLS: dict[str, tuple[dict[str, str], int, str, tuple[Any, ...], Layout, float]] = {
    "tp 8": (
        TP_8, 2048, "unfused", (), Layout(tp=8, global_batch=4, micro_batch=4), 1.3098085471231564,
    ),
    "pp 4": (PP_4, 4096, "flash", (), Layout(pp=4, global_batch=8), 1.225739462758151),
    "vpp 5, half offloaded": (
        VPP_5, 4096, "flash", (BALANCED, half()),
        Layout(tp=4, pp=4, vpp=5, dp=2, global_batch=16), 2.7186064889613455,
    ),
    "zero 3": (
        ZERO_3, 8192, "flash", FULL, Layout(dp=16, zero_stage=3, global_batch=32),
        3.0151049422474845,  # 32,004 words cost what 32,064 cost
    ),
    "tp 2, pp 2, synchronous": (
        SYNC, 2048, "unfused", FULL,
        Layout(tp=2, sp=False, pp=2, dp=2, zero_stage=0, global_batch=8), 0.806985285069093,
    ),
}  # fmt: skip
"""What ran, and the seconds of its step with no word of hosts (norms and RoPE by their names)."""


def with_host(launch_s: float, ranks: float = 8.0) -> Calibration:
    """The round constants with a host that takes its time."""
    return replace(
        ROUND,
        systems={"default": replace(ROUND.systems["default"], host_launch_s=launch_s)},
        networks={"default": replace(ROUND.networks["default"], host_ranks=ranks)},
    )


def lowered(name: str, constants: Calibration) -> tuple[Problem, Program]:
    """A cell's problem and program."""
    what, seq_len, attention, rules, layout, _ = CELLS[name]
    given = Problem(
        Workload(model=load_model(what["model"]), seq_len=seq_len),
        load_cluster(what["cluster"]),
        load_system(what["system"]),
        layout,
        constants,
        attention,  # type: ignore[arg-type]  # one of its words
    )
    return given, lower(given.base_plan.with_rules(*rules), given)


def step_s(name: str, constants: Calibration) -> float:
    """Chunk-level seconds of a cell."""
    given, program = lowered(name, constants)
    return simulate_chunks(program, action_seconds(given)).step_s


@pytest.mark.parametrize("name", CELLS)
def test_hosts_that_issue_at_once_change_no_number(name: str) -> None:
    assert step_s(name, instant_hosts(with_host(1e-3))) == pytest.approx(CELLS[name][-1], rel=1e-12)


@pytest.mark.parametrize("name", CELLS)
def test_a_slower_host_or_fewer_cores_never_make_a_step_faster(name: str) -> None:
    steps = [step_s(name, with_host(launch_s)) for launch_s in (0.0, 1e-5, 1e-4, 1e-3, 1e-2)]
    assert steps == sorted(steps)
    assert steps[-1] > 2 * steps[0], "the slowest host has to be seen"
    cores = [step_s(name, with_host(1e-3, ranks)) for ranks in (8.0, 4.0, 2.0, 1.0)]
    assert cores == sorted(cores)
    assert (cores[-1] > cores[0]) == (CELLS[name][4].tp > 1)


def test_cores_are_shared_by_the_ranks_of_a_node_only() -> None:
    given, _ = lowered("tp 8", with_host(1e-5, ranks=4.0))
    spread = remade(given, layout=replace(given.layout, tp=16))
    assert spread.cost.host_launch_s == given.cost.host_launch_s == 2e-5


class Whimsical:
    """Any seconds at all on the device and on the host, powers of two, so that sums are exact."""

    def __call__(self, action: Action, rank: int) -> float:
        """Seconds on the action's stream."""
        return self._draw("device", action, rank)

    def timing(self, action: Action, rank: int) -> Timing:
        """A third of all waits, and of what is waited for, hold the host."""
        held = random.Random(f"held {action.wait} {action.event}").random() < 1 / 3
        if action.kind in ORDERING:
            return Timing(0.0, 0.0, held)
        return Timing(self(action, rank), self._draw("host", action, rank), held)

    def alike(self, rank: int) -> int:
        """No two ranks."""
        return rank

    def _draw(self, clock: str, action: Action, rank: int) -> float:
        draw = random.Random(f"{clock} {action.kind} {action.part} {action.op} {rank}")
        return draw.choice([0.0, 0.125, 0.5, 1.0, 4.0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PLANS)
def test_chunk_level_equals_op_level(layout: dict[str, Any], name: str) -> None:
    rules, moves = PLANS[name]
    for launch_s, synchronous in ((1e-6, False), (1e-4, True)):
        waits = {"p2p_synchronous": synchronous, "blocking_copies": synchronous}
        given = remade(problem(system_changes=waits, **layout), calibration=with_host(launch_s))
        program = lower(transfers(given.base_plan.with_rules(*rules), **moves), given)
        for seconds in (action_seconds(given), Whimsical()):
            op, chunk = simulate(program, seconds), simulate_chunks(program, seconds)
            assert chunk.step_s == pytest.approx(op.step_s, rel=1e-9)
            assert chunk.rank_end_s == pytest.approx(op.rank_end_s, rel=1e-9)
            assert chunk.stream_busy_s == op.stream_busy_s


class Hand:
    """Device seconds are an action's `n`, a host's are 2; it waits for what records `seen`."""

    def __call__(self, action: Action, rank: int) -> float:
        """Seconds on the action's stream."""
        return float(action.nbytes)

    def timing(self, action: Action, rank: int) -> Timing:
        """`seen` holds the host."""
        return Timing(self(action, rank), 2.0, held=action.event is event_of("seen"))

    def alike(self, rank: int) -> int:
        """No two ranks."""
        return rank


@pytest.mark.parametrize(("event", "step"), [("e0", 2 + 9 + 1), ("seen", 2 + 9 + 2 + 1)])
def test_the_host_leads_until_it_waits(event: str, step: float) -> None:
    """Issued at 2 and 4: the second is ready when the first ends, unless the host waited for it."""
    text = (
        f"rank 0\nblock F\nF0.0 compute L0.a a=L0.x:8 e={event} n=9\nF0.0 compute L0.b r=L0.x n=1\n"
    )
    program = parse_program(text)
    assert simulate(program, Hand()).step_s == step
    assert simulate_chunks(program, Hand()).step_s == step
    assert host_wait_s(Hand(), program, step) == step - 10


def timed(program: Program) -> Iterator[tuple[int, Action]]:
    """Every action that takes part in time, with its rank."""
    for rank in program.ranks:
        for step in rank.steps:
            for action in rank.blocks[step.block].actions:
                if action.kind not in (*TIMELESS, *ORDERING):
                    yield rank.rank, action


def test_a_very_slow_host_sets_the_step() -> None:
    given, program = lowered("tp 8", with_host(0.1))
    costs = ActionCosts(given)
    issued = sum(costs.issue_s(action, rank) for rank, action in timed(program))
    alone = CELLS["tp 8"][-1]
    assert issued <= simulate_chunks(program, costs).step_s <= issued + alone


@pytest.mark.parametrize(("gpus", "gathers"), [(1, 0), (2, 4 * 4 + 2)])
def test_hooks_of_modules_set_the_step_of_short_samples(gpus: int, gathers: int) -> None:
    """A micro-batch of 4 layers passes 4 operators with weights 3 times, the embedding once and the
    head twice.  With peers all matrices are gathered, and so few stay whole until the backward.
    No other ZeRO stage has hooks."""

    def step_s(hook_s: float, stage: int = 3) -> float:
        system = with_facts(load_system("huggingface-deepspeed"), hook_s=hook_s)
        layout = Layout(dp=gpus, zero_stage=stage, global_batch=2 * gpus)
        made = make_problem(
            model=replace(load_model("llama-7b"), num_layers=4), cluster="a100-80gb",
            system=system, seq_len=128, layout=layout,
        )  # fmt: skip
        return evaluate(made, plan_of(made, "full_recompute")).step_s

    hooks = (step_s(2.0) - step_s(1.0)) / 2
    assert hooks == pytest.approx(4 * 4 * 3 + 3 + gathers, abs=1e-6)
    assert step_s(1.0, stage=2) == step_s(0.0, stage=2)


QWEN = {
    "model_type": "qwen", "hidden_size": 4096, "intermediate_size": 22016, "vocab_size": 151936,
    "num_hidden_layers": 32, "num_attention_heads": 32, "kv_channels": 128, "no_bias": True,
    "seq_length": 8192, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
SMALL_QWEN = {
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 24,
    "num_attention_heads": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "gpus", "seq_len", "published"),
    [
        ({}, 2, 256, 4.0),
        ({}, 2, 512, 4.0),
        ({}, 2, 1024, 4.5),
        (SMALL_QWEN, 1, 256, 2.1),
        (SMALL_QWEN, 1, 1024, 2.2),
        (SMALL_QWEN, 1, 2048, 2.3),
    ],
)
def test_short_samples_under_zero_3_take_as_long_as_published(
    tmp_path: Path, changes: dict[str, int], gpus: int, seq_len: int, published: float
) -> None:
    """QwenLM/Qwen README.md (03cd81f), full-parameter finetuning: 8 micro-batches of one sample."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN | changes), encoding="utf-8")
    made = make_problem(
        model=load_model(str(tmp_path / "config.json")), cluster="a100-80gb",
        system="huggingface-deepspeed", seq_len=seq_len,
        layout=Layout(dp=gpus, zero_stage=3, global_batch=8 * gpus),
    )  # fmt: skip
    plan = plan_of(made, "full_recompute")
    assert evaluate(made, plan).step_s == pytest.approx(published, rel=0.12)


def test_messages_hold_a_host_only_where_the_stack_waits_for_them() -> None:
    def held(name: str, **changes: Any) -> int:
        given, program = lowered(name, ROUND)
        costs = ActionCosts(remade(given, system=with_facts(given.system, **changes)))
        return sum(costs.held(a) for r in program.ranks for b in r.blocks for a in b.actions)

    assert held("tp 2, pp 2, synchronous")
    assert not held("tp 2, pp 2, synchronous", p2p_synchronous=False)
    assert not held("tp 2, pp 2, synchronous", p2p_overlap="always")


def test_what_is_compiled_is_issued_at_once() -> None:
    given, _ = lowered("tp 8", with_host(1e-5))
    eager, cost = given.layer(0).op("attention"), given.cost
    assert cost.calls(eager, "forward") == 4  # two batched GEMMs, softmax, dropout
    assert cost.calls(eager, "backward_input") == 6
    whole = remade(given, system=with_facts(given.system, compiled=True), calibration=ROUND)
    assert whole.cost.calls(eager, "backward_input") == 1


@pytest.mark.parametrize("tp", [1, 2])
def test_a_compiled_region_is_a_launch_between_collectives(tp: int) -> None:
    """A layer's pass is a launch, and one more for each collective between two of its kernels."""
    given = problem(system="torchtitan", system_changes={"compiled": True}, tp=tp, global_batch=1)
    given = remade(given, calibration=with_host(1.0))
    costs, (rank, *_) = ActionCosts(given), lower(given.base_plan, given).ranks
    for block in rank.blocks:
        mine = [action for action in block.actions if action.part == "L0"]
        issued = sum(costs.issue_s(action, 0) for action in mine if action.kind in DIRECTION)
        collectives = sum(action.exchange.comm is not None for action in mine)
        if block.label in "FB":
            apart = 1 if block.label == "B" and tp > 1 else 0  # two gathers follow each other
            assert issued == 1 + collectives - apart
            assert bool(collectives) == (tp > 1)


def test_blocking_copies_hold_the_host_but_copies_of_states_do_not() -> None:
    given = problem(system="deepspeed", dp=2, zero_stage=3, global_batch=2)
    assert given.system.host.blocking_copies
    program = lower(given.base_plan.with_rules(BALANCED, half()), given)
    costs = ActionCosts(given)
    actions = [a for rank in program.ranks for block in rank.blocks for a in block.actions]
    copies = [a for a in actions if a.kind in (Kind.D2H, Kind.H2D)]
    assert copies
    assert all(costs.held(copy) for copy in copies)
    assert not costs.held(replace(copies[0], op=GRADIENTS_DOWN))
    assert not any(costs.held(a) for a in actions if a not in copies)


def test_blocking_copies_never_make_a_step_faster() -> None:
    """The host issues nothing while it waits for a copy, so a slow host pays for each."""
    steps = []
    for blocks in (False, True):
        layout = {"dp": 2, "zero_stage": 3, "global_batch": 4}
        given = problem(system="deepspeed", system_changes={"blocking_copies": blocks}, **layout)
        given = remade(given, calibration=with_host(1e-4))
        program = lower(given.base_plan.with_rules(BALANCED, half()), given)
        steps.append(simulate_chunks(program, action_seconds(given)).step_s)
    assert steps[1] > steps[0]


# -- blocking launches: the host waits for each kernel, so nothing overlaps on a rank --------------


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
