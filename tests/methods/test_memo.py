"""MEMO: alpha in closed form, what leaves, the rounding buffers, and who binds."""

from typing import Any

import msgspec
import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.program.ledger import issue_order, pool_bytes
from rematbench.engine.program.program import Program
from rematbench.engine.program.storage import COPIED_OUT
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.evaluate.result import evaluate_plan
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import with_facts
from rematbench.plan import Plan, Recompute, Rule, Select, Unsupported
from rematbench.problem import Problem
from rematbench.solve.memory_plan import is_placeable, planned_peak
from tests.engine.twin.interpreter import interpret
from tests.problems import (
    GPT,
    all_methods,
    layers,
    make_problem,
    on,
    plan_of,
    problem,
    refusal,
    remade,
)

REGISTRY = all_methods()
KIB = 1 << 10
WHOLE = ("layer_input", "attn_out", "lse")


def paper(seq_len: int, **layout: Any) -> Problem:
    """The headline's problem: 7B on one node of eight A800, 2 TiB of host memory."""
    return make_problem(
        model="memo-gpt-7b",
        cluster="a800-80gb",
        system="rematbench",
        layout=Layout(**{"tp": 8, "global_batch": 1, **layout}),
        seq_len=seq_len,
    )


def node_host_bytes(p: Problem, plan: Plan) -> int:
    return evaluate(p, plan).host_node_bytes


# -- the two constraints ----------------------------------------------------------------------


def test_alpha_at_1m_tokens_is_bound_by_host_memory() -> None:
    """The system leaves 248.3 of 256 GiB a GPU: 30 (2 + 14 alpha) GiB gives 0.447, attention's row
    statistics take 0.001 of it.  The plan places its own host memory: a part of a tensor takes its
    own bytes, not a block of a power of two."""
    p = paper(1 << 20)
    fit = plan_of(p, "memo").fit
    assert fit["bound"] == "host memory"
    exact = (p.cost.host_room_bytes / 8 / 2**30 / 30 - 2 - 1 / 64) / 14
    assert fit["alpha_host"] == pytest.approx(exact)
    assert 0.447 < exact < 0.448
    rows = p.layer(0).activations["layer_input"].rows
    assert fit["alpha"] == int(exact * rows) / rows
    assert isinstance(fit["alpha_bandwidth"], float)
    assert fit["alpha_bandwidth"] > 1.0


@pytest.mark.parametrize("seq_len", [640 * KIB, 1 << 20])
def test_another_row_of_every_layer_does_not_fit_the_host(seq_len: int) -> None:
    p = paper(seq_len)
    alpha, room = float(plan_of(p, "memo").fit["alpha"]), p.cost.host_room_bytes
    assert node_host_bytes(p, plan_of(p, "memo")) <= room
    rows = p.layer(0).activations["layer_input"].rows
    assert node_host_bytes(p, plan_of(p, "memo", alpha=alpha + 1 / rows)) > room


def test_full_offload_hides_from_the_length_whose_bound_is_one() -> None:
    """The bandwidth bound grows with the sequence, and the simulated step waits for copies up to
    the length at which the bound is 1; in the paper's figure 1b that is about 192K tokens."""
    lengths = range(112, 257, 16)
    bounds = [float(plan_of(paper(k * KIB), "memo").fit["alpha_bandwidth"]) for k in lengths]
    assert bounds == sorted(bounds)
    hides = next(k for k, bound in zip(lengths, bounds, strict=True) if bound >= 1.0)
    assert 128 < hides < 256
    for k in (hides - 16, hides):
        p = paper(k * KIB, zero_stage=0)
        found = evaluate(p, plan_of(p, "memo", alpha=1.0))
        compute, tp = found.simulation.stream_busy_s[0][:2]
        assert (found.step_s > 1.002 * (compute + tp)) == (k < hides)


def test_copies_hide_up_to_the_bound_and_not_beyond() -> None:
    """Nothing else overlaps here, so a step without waits lasts as long as compute and tp work."""
    p = paper(96 * KIB, zero_stage=0)
    plan = plan_of(p, "memo")
    assert plan.fit["bound"] == "PCIe bandwidth"
    for alpha, waits in ((float(plan.fit["alpha"]), False), (1.0, True)):
        found = evaluate(p, plan_of(p, "memo", alpha=alpha))
        compute, tp = found.simulation.stream_busy_s[0][:2]
        assert (found.step_s > 1.01 * (compute + tp)) == waits
        if not waits:
            assert found.step_s == pytest.approx(compute + tp, rel=1e-3)


def test_a_given_host_size_binds() -> None:
    p = problem(model=layers(6))
    tensors = p.layer(0).activations
    whole = sum(tensors[n].nbytes for n in WHOLE)
    other = sum(tensors[n].nbytes for n in p.layer(0).saved if n not in WHOLE)
    half = 4 * (whole + other // 2)
    fit = plan_of(p, "memo", host_bytes=half).fit
    assert fit["alpha_host"] == pytest.approx(0.5)


def test_too_little_host_is_alpha_zero_and_says_so() -> None:
    fit = plan_of(paper(1 << 20), "memo", host_bytes=1 << 30).fit
    assert fit["alpha"] == 0.0
    assert "host memory" in str(fit["bound"])
    assert "exceeded even with alpha 0" in str(fit["bound"])


# -- what leaves ------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_bytes_on_the_host_are_the_closed_form(alpha: float) -> None:
    p = problem(model=layers(6))
    tensors = p.layer(0).activations
    whole = sum(tensors[n].nbytes for n in WHOLE)
    other = sum(tensors[n].nbytes for n in p.layer(0).saved if n not in WHOLE)
    (ledger,) = issue_order(lower(plan_of(p, "memo", alpha=alpha), p))
    assert ledger.host_peak_bytes == 4 * (whole + alpha * other)


def test_attention_never_runs_again_and_the_last_two_layers_never_do() -> None:
    p = problem(model=layers(6), tp=2)
    (rank,) = lower(plan_of(p, "memo", alpha=0.5), p).ranks
    again = [a for b in rank.blocks for a in b.actions if a.kind is Kind.RECOMPUTE]
    assert "attention" not in {a.op for a in again}
    assert {a.part for a in again} == {"L0", "L1", "L2", "L3"}
    assert {a.rows.fraction for a in again} == {0.5}
    moved = {a.part for b in rank.blocks for a in b.actions if a.kind in (Kind.D2H, Kind.H2D)}
    assert moved == {"L0", "L1", "L2", "L3"}


def test_prefetch_of_layer_i_follows_the_backward_of_layer_i_plus_2() -> None:
    p = problem(model=layers(6))
    (rank,) = lower(plan_of(p, "memo", alpha=0.5), p).ranks
    backward = next(block for block in rank.blocks if block.label == "B")
    order = [
        (a.kind, a.part)
        for a in backward.actions
        if a.kind is Kind.H2D or (a.kind is Kind.BACKWARD_INPUT and a.op == "attn_norm")
    ]
    for layer in range(4):
        first = order.index((Kind.H2D, f"L{layer}"))
        assert (Kind.BACKWARD_INPUT, f"L{layer + 2}") in order[:first]
        assert (Kind.BACKWARD_INPUT, f"L{layer + 1}") not in order[:first]


# -- rounding buffers -------------------------------------------------------------------------


def test_two_buffers_hold_a_layer_each() -> None:
    """The exempt layers wait in the buffers (all but their inputs), so a buffer is a layer."""
    p = problem(model=layers(6))
    tensors = p.layer(0).activations
    (rank,) = lower(plan_of(p, "memo", alpha=0.5), p).ranks
    inner = sum(tensors[n].nbytes for n in p.layer(0).saved if n != "layer_input")
    assert pool_bytes(rank) == 2 * inner
    assert pool_bytes(lower(plan_of(p, "memo", alpha=0.5, buffers=0), p).ranks[0]) == 0


def test_device_bytes_do_not_grow_with_the_layers() -> None:
    peaks = []
    for count in (6, 12):
        p = problem(model=layers(count))
        lowered = lower(plan_of(p, "memo", alpha=1.0), p)
        peaks.append(issue_order(lowered)[0].device_peak_bytes + pool_bytes(lowered.ranks[0]))
    assert peaks[0] == peaks[1]


def pipelined() -> tuple[Problem, Program]:
    """A slow link: a layer's copies take longer than its forward."""
    p = problem(model=layers(12), pp=2, vpp=2, global_batch=4)
    p = on(p, pcie_bytes_per_s=1e8)
    return p, lower(plan_of(p, "memo", alpha=1.0), p)


def test_copies_run_on_beside_the_next_pass() -> None:
    """The pass after a chunk's forward, and its send, start while the chunk's last copies are under
    way; its device copies are freed after that pass."""
    p, lowered = pipelined()
    check(lowered)
    interpret(lowered)
    found = simulate(lowered, action_seconds(p, lowered), record=True)
    moved = [i for i in found.intervals if i.rank == 0]
    send = next(i for i in moved if i.action.kind is Kind.SEND)
    copies = [i for i in moved if i.action.kind is Kind.D2H and i[-2:] == send[-2:]]
    assert send.start_s < copies[-1].end_s
    order = [i for i in moved if i.action.kind is Kind.FORWARD or i.action.event is COPIED_OUT]
    last = max(order.index(i) for i in order if i.action.event is COPIED_OUT and i[-2:] == (0, 0))
    follower = next(i for i in order[last:] if i.action.kind is Kind.FORWARD)
    assert follower[-2:] != (0, 0)
    assert follower.start_s < order[last].end_s
    labels = [lowered.ranks[0].blocks[step.block].label for step in lowered.ranks[0].steps]
    first = labels.index("free_d2h")
    assert labels[:first].count("F") == 2  # its own pass and the next


# -- addresses --------------------------------------------------------------------------------


def test_memo_gets_the_verdict_of_its_own_addresses() -> None:
    """The default allocator's holes cost the 7B, 1M-token job 10 GiB if a quarter leaves; its plan
    has none."""
    p = paper(1 << 20)
    plan = plan_of(p, "memo:alpha=0.25+mst")
    assert plan.addresses == "planned"
    found = evaluate_plan(p, plan)
    left = evaluate_plan(p, msgspec.structs.replace(plan, addresses="allocator"))
    assert (found.status, left.status) == ("ok", "oom")
    peak = max(found.evaluation.peak_device_bytes)
    assert peak <= found.evaluation.reserved_bytes < 1.01 * peak
    assert left.evaluation.reserved_bytes > 1.1 * peak
    assert found.evaluation.step_s == left.evaluation.step_s


def test_a_plan_that_places_its_memory_pins_what_its_tensors_need() -> None:
    """Torch's blocks of the same tensors do not fit the host."""
    p = paper(1 << 20)
    plan = plan_of(p, "memo")
    placed = evaluate(p, plan)
    blocks = evaluate(p, msgspec.structs.replace(plan, addresses="allocator"))
    assert placed.ranks[0].host_rounding == 0 < blocks.ranks[0].host_rounding
    assert placed.ranks[0].host_activation_peak == blocks.ranks[0].host_activation_peak
    assert 0.99 * p.cost.host_room_bytes < placed.host_node_bytes <= p.cost.host_room_bytes
    assert blocks.host_node_bytes > p.cost.host_room_bytes


def test_exact_pinned_sizes_are_a_fact_of_the_stack() -> None:
    """Megatron-Kwai takes its host buffers from CUDA; torch's blocks are up to twice as large."""
    spec = {"model": "llama-65b", "cluster": "h800-80gb", "seq_len": 4096}
    layout = Layout(tp=4, pp=4, vpp=5, dp=4, global_batch=256)
    p = make_problem(system="megatron-kwai", layout=layout, **spec)
    plan = plan_of(p, "pp_offload", alpha=0.3)
    system = with_facts(p.system, pinned_blocks="powers_of_two")
    exact, blocks = (evaluate(q, plan) for q in (p, remade(p, system=system)))
    assert exact.ranks[0].host_rounding == 0
    assert exact.host_node_bytes < blocks.host_node_bytes < 2 * exact.host_node_bytes
    assert exact.step_s == blocks.step_s


def test_addresses_of_many_tensors_are_the_allocators() -> None:
    p = problem(model=layers(12), pp=2, global_batch=64)
    plan = plan_of(p, "memo", alpha=0.5)
    (rank, _) = lower(plan, p).ranks
    assert planned_peak(rank) == 0
    few = problem(model=layers(12), pp=2, global_batch=2)
    ranks = lower(plan_of(few, "memo", alpha=0.5), few).ranks
    assert [is_placeable(one) for one in (rank, *ranks)] == [False, True, True]


def test_expandable_segments_are_a_fact_of_the_stack() -> None:
    p = paper(1 << 20)
    quarter = plan_of(p, "memo:alpha=0.25+mst")
    plan = msgspec.structs.replace(quarter, addresses="allocator")
    grown = remade(p, system=with_facts(p.system, expandable_segments=True))
    found = [evaluate_plan(q, plan).evaluation for q in (p, grown)]
    assert found[1].reserved_bytes < found[0].reserved_bytes
    assert found[1].step_s == found[0].step_s


# -- refusals and composition -----------------------------------------------------------------


def test_refusals_name_the_reason() -> None:
    assert "more than 2 layers on every rank" in refusal(problem(model=layers(2)), "memo")
    assert "no activation offload" in refusal(
        problem(model=layers(6), system="megatron-lm"), "memo"
    )
    unfused = problem(model=layers(6, GPT), attention="unfused")
    assert "fused attention" in refusal(unfused, "memo")


def test_what_a_base_recomputes_stays_recomputed() -> None:
    p = problem(model=layers(6))
    plan = plan_of(p, "balanced_checkpointing+memo", alpha=1.0)
    tensors = p.layer(0).activations
    dropped = {"attn_norm_out", "mlp_norm_out", "act_out", "fc2_in"}
    (ledger,) = issue_order(lower(plan, p))
    left = sum(tensors[n].nbytes for n in p.layer(0).saved if n not in dropped)
    assert ledger.host_peak_bytes == 4 * left


def test_a_base_that_keeps_nothing_leaves_nothing_to_swap() -> None:
    p = problem(model=layers(6))
    everything = Rule(Select(parts=("layer",)), Recompute())
    (method,) = REGISTRY.resolve("memo").methods
    answer = method.plan(p, p.base_plan.with_rules(everything))
    assert isinstance(answer, Unsupported)


def test_a_copy_runs_on_past_layers_of_its_chunk_that_leave_nothing() -> None:
    """The last chunk's last two layers stay: its copy is still freed once, after the next pass."""
    p = problem(model=layers(32), pp=4, vpp=2, global_batch=4)
    lowered = lower(plan_of(p, "memo", alpha=1.0), p)
    check(lowered)
    interpret(lowered)
    assert evaluate(p, plan_of(p, "memo", alpha=1.0)).step_s > 0
