"""Recomputation beside collectives: windows, the front, the MILP, and plans that fit."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import ALONE, Kind
from rematbench.engine.program.storage import Event
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.proof import check
from rematbench.inputs.layout import Layout
from rematbench.plan import Recompute, Window
from rematbench.problem import Problem
from rematbench.solve import layer_policies, relocate
from rematbench.solve.layer_policies import (
    LayerGroup,
    StagePolicy,
    greedy_policy,
    heuristic,
    optimum,
    policy_front,
)
from rematbench.solve.relocate import Relocation
from rematbench.solve.stage_times import balance, contiguous
from rematbench.solve.windows import LayerWindows, Slot, WindowJob, idle_s, layer_windows
from tests.engine.twin.interpreter import interpret
from tests.problems import layers, make_problem, plan_of, problem, refusal, rule, tight

BOTH = ("lynx_heu", "lynx_opt")
SHARES = [0.5, *(pytest.param(share, marks=pytest.mark.full) for share in (0.15, 0.85))]


def gpt(system: str = "rematbench", seq_len: int = 2048, **layout: Any) -> Problem:
    """22B on four stages of four GPUs with 40 GB: it fits only with some recomputation."""
    degrees = {"tp": 4, "pp": 4, "micro_batch": 4, "global_batch": 32, "zero_stage": 0}
    return make_problem(
        model="gpt-22b",
        cluster="a100-40gb-roce1600",
        system=system,
        layout=Layout(**{**degrees, **layout}),
        seq_len=seq_len,
    )


def windows_of(p: Problem) -> LayerWindows:
    table = p.layer(0)
    return layer_windows(p, table, set(table.saved) - {"layer_input"})


# -- windows ----------------------------------------------------------------------------------


def test_idle_time_is_the_collective_where_nothing_overlaps() -> None:
    p = gpt()
    for op in p.layer(0).ops:
        first = op.grad_gather or op.regather or op.grad_reduce
        assert idle_s(p, op) == (p.cost.comm_s(first, 0) if first else 0.0)


def test_idle_time_is_what_sticks_out_of_the_gemm_beside_it() -> None:
    p = gpt("megatron-lm")
    ops = {op.name: op for op in p.layer(0).ops}
    fc1 = ops["fc1"]
    assert fc1.regather is not None
    beside = p.cost.op_s(fc1, "backward_input")
    assert idle_s(p, fc1) == max(0.0, p.cost.comm_s(fc1.regather, 0) - beside)
    assert ops["fc2"].grad_gather is not None
    assert idle_s(p, ops["fc2"]) == p.cost.comm_s(ops["fc2"].grad_gather, 0)


def test_without_tensor_parallelism_there_is_no_window() -> None:
    assert windows_of(problem(pp=2, global_batch=4)).slots == ()


def test_jobs_with_collectives_stay_out_of_windows() -> None:
    layer = windows_of(gpt())
    hides = {job.op: job.hides for job in layer.jobs}
    assert hides["attention"]
    assert hides["act"]
    assert not hides["qkv"]  # gathers its sequence shards
    assert not hides["attn_add"]  # runs the projection, which scatters


def test_windows_close_before_the_first_reader() -> None:
    layer = windows_of(gpt())
    act = next(job for job in layer.jobs if job.op == "act")
    assert all(slot.layer_offset == 1 for slot in layer.allowed(act))  # fc2 reads it first
    norm = next(job for job in layer.jobs if job.op == "attn_norm")
    assert {(s.op, s.layer_offset) for s in layer.allowed(norm)} >= {("fc2", 0), ("proj", 0)}


# -- policies ---------------------------------------------------------------------------------


@st.composite
def layer_problems(draw: st.DrawFn) -> LayerWindows:
    """Random jobs over a chain of operators, and two windows in each of two layers."""
    names = [f"op{i}" for i in range(draw(st.integers(2, 5)))]
    jobs = tuple(
        WindowJob(
            op=name,
            outputs=(f"{name}_out",),
            nbytes=draw(st.integers(1, 50)),
            seconds=draw(st.integers(1, 40)) / 10,
            needs=tuple(n for n in names[:i] if draw(st.booleans())),
            deadline=10 - i,
            hides=draw(st.booleans()),
        )
        for i, name in enumerate(names)
    )
    slots = tuple(
        Slot(op=op, layer_offset=offset, order=at - 20 * offset)
        for offset in (1, 0)
        for op, at in (("a", 4), ("b", 8))
    )
    idle = {op: draw(st.integers(0, 60)) / 10 for op in ("a", "b")}
    return LayerWindows(jobs=jobs, slots=slots, idle_s=idle)


def legal(layer: LayerWindows, policy: StagePolicy) -> bool:
    """Whether every job's window closes in time and opens after what it reads is there."""
    never = 10**6
    when = {x.job.op: x.slot.order if x.slot else never for x in policy.placements}
    for item in policy.placements:
        if item.slot is None:
            continue
        late = [when[n] > item.slot.order for n in item.job.needs if n in when]
        if item.slot not in layer.allowed(item.job) or any(late):
            return False
    return True


@given(layer_problems(), st.floats(0, 1))
def test_the_milp_is_never_worse_than_the_heuristic(layer: LayerWindows, share: float) -> None:
    groups = [LayerGroup(layers=2, in_flight=4), LayerGroup(layers=1, in_flight=2)]
    total = 6 * sum(job.nbytes for job in layer.jobs)
    budget = share * total
    shared = heuristic(policy_front(layer, 3), groups, budget)
    best = optimum(layer, groups, budget, 3)
    assert best is not None
    assert all(legal(layer, policy) for policy in (*best, shared))
    kept = sum(p.kept_bytes * g.in_flight for p, g in zip(best, groups, strict=True))
    assert kept <= budget * (1 + 1e-6) + 1e-6
    exact = sum(p.cost_s * g.layers for p, g in zip(best, groups, strict=True))
    assert exact <= 3 * shared.cost_s * (1 + 2e-3) + 1e-9


@given(layer_problems())
def test_the_front_falls_in_bytes_and_rises_in_seconds(layer: LayerWindows) -> None:
    front = policy_front(layer, 3)
    assert front[0].placements == ()
    assert front[-1].kept_bytes == 0
    assert [p.kept_bytes for p in front] == sorted((p.kept_bytes for p in front), reverse=True)
    assert [p.cost_s for p in front] == sorted(p.cost_s for p in front)
    assert all(legal(layer, policy) for policy in front)


def test_a_job_that_fits_its_window_is_free() -> None:
    job = WindowJob(op="x", outputs=("y",), nbytes=8, seconds=1.0, needs=(), deadline=9, hides=True)
    slots = (Slot(op="a", layer_offset=0, order=4),)
    wide = LayerWindows(jobs=(job,), slots=slots, idle_s={"a": 2.0})
    narrow = replace(wide, idle_s={"a": 0.25})
    assert greedy_policy(wide, (job,), 4).exposed_s == 0.0
    assert greedy_policy(narrow, (job,), 4).exposed_s == 0.75


def test_without_jobs_there_is_nothing_to_choose() -> None:
    nothing = LayerWindows(jobs=(), slots=(), idle_s={})
    groups = [LayerGroup(layers=2, in_flight=4), LayerGroup(layers=1, in_flight=2)]
    (empty,) = policy_front(nothing, 3)
    assert optimum(nothing, groups, 0.0, 3) == (empty, empty)
    assert (empty.placements, empty.kept_bytes) == ((), 0)


@pytest.mark.parametrize(
    ("stall", "offset", "hides"), [(0.2, 0, True), (0.2, 1, True), (0.9, 1, False), (1.1, 0, False)]
)
def test_a_hidden_job_costs_the_stall_of_its_window(stall: float, offset: int, hides: bool) -> None:
    """A job that is longer by more beside the collective than by itself does not hide; the
    heuristic and the optimum agree.  A window of the layer above is missing in one layer of 4."""
    job = WindowJob(op="x", outputs=("y",), nbytes=8, seconds=1.0, needs=(), deadline=9, hides=True)
    slots = (Slot(op="a", layer_offset=offset, order=4),)
    layer = LayerWindows(jobs=(job,), slots=slots, idle_s={"a": 2.0}, stall=stall)
    greedy = greedy_policy(layer, (job,), 4)
    (best,) = optimum(layer, [LayerGroup(layers=4, in_flight=1)], 0.0, 4)
    for policy in (greedy, best):
        assert [item.slot is not None for item in policy.placements] == [hides]
        assert policy.exposed_s == pytest.approx(stall + offset / 4 if hides else 1.0)


def test_a_window_has_the_stall_of_its_stacks_collectives() -> None:
    p = gpt()
    assert windows_of(p).stall == p.cost.stack.tp_stall > 0


def test_the_layer_is_searched_once_for_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer and front are solved once, and a stage looks its policies up in the front."""
    counts: Counter[str] = Counter()
    names = ("layer_windows", "policy_front", "heuristic")
    for module, name in (*((relocate, n) for n in names), (layer_policies, "greedy_policy")):
        monkeypatch.setattr(module, name, _counted(counts, name, getattr(module, name)))
    p = gpt()
    relocation = Relocation(p, p.base_plan, exact=False)
    stages = relocation.stages(p.base_plan)
    for stage in stages:
        stage.solve(relocation.layer, relocation.front, 10e9, relocation.per_chunk)
    sets = 2 ** len(relocation.layer.jobs)
    assert counts == {
        "layer_windows": 1, "policy_front": 1, "greedy_policy": sets, "heuristic": len(stages)
    }  # fmt: skip


def _counted(counts: Counter[str], name: str, function: Any) -> Any:
    def counted(*given: Any, **named: Any) -> Any:
        counts[name] += 1
        return function(*given, **named)

    return counted


# -- partition --------------------------------------------------------------------------------


def test_balancing_moves_layers_from_the_slowest_stage() -> None:
    """Stages twice as slow per layer end with half the layers."""
    pace = (1.0, 1.0, 2.0, 1.0)
    found = balance((7, 7, 7, 7), lambda rank, n: pace[rank] * n)
    assert sum(found) == 28
    assert max(pace[r] * n for r, n in enumerate(found)) == 8.0
    assert found[2] == 4


def test_balancing_leaves_what_does_not_fit() -> None:
    found = balance((4, 4), lambda rank, n: float("inf") if rank == 1 and n > 4 else n + 3 - rank)
    assert found == (4, 4)


def test_a_partition_is_contiguous() -> None:
    assert contiguous((2, 1)) == (((0, 1),), ((2,),))


# -- plans ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", BOTH)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("degrees", [{}, {"sp": False}, {"vpp": 2}, {"pp": 1}, {"tp": 1}])
def test_plans_fit_and_are_sound(spec: str, share: float, degrees: dict[str, Any]) -> None:
    layout = {"tp": 2, "pp": 2, "global_batch": 4, **degrees}
    p = tight(problem(model=layers(8), seq_len=64, **layout), share)
    plan = plan_of(p, spec)
    assert p.cost.peak_bytes(plan) <= p.usable_bytes
    lowered = lower(plan, p)
    check(lowered)
    interpret(lowered)


@pytest.mark.full
@pytest.mark.parametrize("system", ["rematbench", "megatron-lm"])
def test_both_beat_every_recomputation_of_megatron_that_fits(system: str) -> None:
    p = gpt(system)
    usable = p.usable_bytes
    rivals = [plan_of(p, "full_recompute"), plan_of(p, "balanced_checkpointing")]
    rivals += [plan_of(p, "full_recompute", method="block", num_layers=n) for n in range(1, 12)]
    best = min(p.cost.step_s(plan) for plan in rivals if p.cost.peak_bytes(plan) <= usable)
    for spec in BOTH:
        plan = plan_of(p, spec)
        assert p.cost.peak_bytes(plan) <= usable
        assert p.cost.step_s(plan) <= best


def test_a_plan_that_fits_is_left_alone() -> None:
    p = gpt(micro_batch=1, global_batch=8)
    for spec in BOTH:
        assert plan_of(p, spec).rules == ()


def test_what_never_fits_is_rebuilt_as_far_as_possible() -> None:
    p = tight(problem(model=layers(8), tp=2, pp=2, global_batch=4), -1.0)
    plan = plan_of(p, "lynx_heu", repartition=False)
    assert plan.fit["bound"] == "no choice fits the device memory"
    lean = Relocation(p, p.base_plan, exact=False).smallest_plan(p.base_plan)
    assert p.cost.peak_bytes(plan) <= p.cost.peak_bytes(lean)


def test_hidden_work_and_its_collective_lose_to_each_other() -> None:
    """A kernel beside a collective costs tp_stall x the shorter of the two, once both are done."""
    p = tight(problem(model=layers(8), seq_len=64, tp=2, global_batch=4), 0.7)
    lowered = lower(plan_of(p, "lynx_opt"), p)
    alike = [a for rank in lowered.ranks for b in rank.blocks for a in b.actions]
    stalls = [a for a in alike if a.kind is Kind.STALL]
    assert stalls
    seconds = action_seconds(p)
    for stall in stalls:
        assert stall.exchange.comm is not None
        kernel = replace(stall, kind=Kind.RECOMPUTE, exchange=ALONE)
        shorter = min(seconds(kernel, 0), p.cost.comm_s(stall.exchange.comm, 0))
        assert seconds(stall, 0) == pytest.approx(p.cost.stack.tp_stall * shorter)
    for block in (b for rank in lowered.ranks for b in rank.blocks if b.label == "B"):
        pending: set[Event] = set()
        for action in block.actions:
            if action.stream == "tp" and action.event:
                pending.add(action.event)
            if action.wait:
                pending.discard(action.wait)
            assert action.kind is not Kind.STALL or not pending


def test_a_step_is_longer_by_the_stalls_of_the_rank_that_sets_it() -> None:
    """Norms rebuilt beside a collective hide: on one stage the step is keep_all's and the stalls,
    no more and no less.  Of a stage with slack the step shows less than its stalls."""
    hidden = Recompute(window=Window(op="fc2", direction="backward"))
    for pp, stages in ((1, None), (4, (0,))):
        p = gpt(pp=pp, global_batch=16)
        work = rule(hidden, "mlp_norm_out", stages=stages)
        plans = p.base_plan, p.base_plan.with_rules(work)
        programs = [lower(plan, p) for plan in plans]
        keep_s, step_s = (simulate(one, action_seconds(p, one)).step_s for one in programs)
        seconds, own = action_seconds(p, programs[1]), programs[1].ranks[0]
        stall_s = sum(
            seconds(action, 0) * runs
            for block, runs in zip(own.blocks, own.runs, strict=True)
            for action in block.actions
            if action.kind is Kind.STALL
        )
        assert stall_s > 1e-4 * keep_s
        if pp == 1:
            assert step_s - keep_s == pytest.approx(stall_s, rel=1e-6)
        else:
            assert step_s - keep_s < 0.9 * stall_s


def test_refusal_and_composition() -> None:
    assert "communication" in refusal(problem(), "lynx_heu")
    p = tight(problem(model=layers(8), seq_len=64, tp=2, pp=2, global_batch=4), 0.6)
    plan = plan_of(p, "balanced_checkpointing+lynx_heu+mst")
    check(lower(plan, p))
    interpret(lower(plan, p))
