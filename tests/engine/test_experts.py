"""Steps of models with experts: collectives, the host's waits, recomputed modules, methods."""

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.costs.operators.launches import COUNTS, uncaptured
from rematbench.costs.operators.ops import Comm
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.storage import Role
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import ActionCosts
from rematbench.evaluate.breakdown import parts_of
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.evaluate.result import assumed
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.load import load_cluster
from rematbench.inputs.system import with_facts
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.workload import Experts
from rematbench.worlds.records.refusals import refusals
from tests.problems import LLAMA, layers, plan_of, problem, refusal, remade
from tests.tables import tables

ALL = Experts(count=8, active=2, ffn=64)
MIXTURE = replace(LLAMA, experts=ALL)
SHARED = replace(MIXTURE, experts=replace(ALL, shared_ffn=32, dense_layers=(0,)))


def given(model: Any = MIXTURE, **layout: Any) -> Problem:
    made = problem(**{"model": model, "dp": 4, "ep": 4, "global_batch": 4, **layout})
    return remade(made, evaluator=evaluate)


def actions(found: Problem, plan: Plan | None = None) -> list[Action]:
    program = lower(plan or found.base_plan, found)
    check(program)
    return [action for rank in program.ranks for action, _, _ in rank.actions()]


def comms(found: Problem, op: str) -> list[Comm]:
    """The collectives of an operator."""
    return [a.exchange.comm for a in actions(found) if a.op == op and a.exchange.comm]


def exchanges(found: Problem, plan: Plan | None = None) -> Counter[tuple[Kind, str]]:
    named = [a for a in actions(found, plan) if a.exchange.comm and a.exchange.comm.group == "ep"]
    return Counter((action.kind, action.op) for action in named)


def test_tokens_are_exchanged_twice_in_each_direction() -> None:
    found = given()
    layers_ = found.workload.model.num_layers
    assert exchanges(found) == {
        (Kind.ALL_TO_ALL, "dispatch"): 2 * layers_,
        (Kind.ALL_TO_ALL, "combine"): 2 * layers_,
        (Kind.ALL_GATHER, COUNTS): layers_,
    }
    assert not exchanges(given(ep=1))


def test_recomputing_experts_sends_their_tokens_again() -> None:
    found = given()
    plan = plan_of(found, "selective_recompute", modules=["moe"])
    count = found.workload.model.num_layers
    for name in ("dispatch", "combine"):
        assert exchanges(found, plan)[Kind.ALL_TO_ALL, name] == 3 * count
    assert exchanges(found, plan)[Kind.ALL_GATHER, COUNTS] == 2 * count
    cheap = plan_of(found, "selective_recompute", modules=["moe_act", "layernorm"])
    assert exchanges(found, cheap) == exchanges(found)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_of_experts_are_summed_over_their_own_peers(stage: int, overlap: bool) -> None:
    changes = {"reduce_overlap": overlap, "gather_overlap": overlap, "bucket_bytes": 1 << 40}
    found = given(dp=4, ep=2, zero_stage=stage, system_changes=changes)
    table, width = found.layer(0), found.system.states.reduce_bytes
    experts = found.workload.model.num_layers * table.expert_parameters
    kind: Any = "reduce_scatter" if stage else "all_reduce"
    rest = LLAMA.parameters - 4 * LLAMA.mlp_parameters(LLAMA.ffn) + 4 * 8 * LLAMA.hidden
    summed = [Comm(kind, "dp", width * rest), Comm(kind, "edp", width * experts)]
    assert comms(found, "gradients") == summed
    gathers = comms(found, "parameters")
    assert {comm.group for comm in gathers} == ({"dp", "edp"} if stage else set())
    moved = sum(comm.nbytes for comm in gathers if comm.group == "edp")
    assert moved == (found.system.states.gather_bytes * experts if stage else 0)


def test_experts_without_peers_are_not_reduced() -> None:
    assert {comm.group for comm in comms(given(), "gradients")} == {"dp"}


def test_tensor_parallel_ranks_can_be_the_only_peers_of_experts() -> None:
    found = given(tp=2, dp=1, ep=1, etp=1, global_batch=1)
    assert (found.layout.state_shards, found.layout.expert_dp) == (1, 2)
    held = evaluate(found, found.base_plan).ranks[0]
    experts = 4 * found.layer(0).expert_parameters
    rest = sum(table.parameters for table in (found.embedding, found.head)) + 4 * (
        found.layer(0).parameters - found.layer(0).expert_parameters
    )
    assert held.optimizer == found.system.states.optimizer_bytes * (rest + experts // 2)
    assert "edp" in {comm.group for comm in comms(found, "gradients")}


def counts(found: Problem) -> tuple[int, int]:
    """Parameters of a rank (without pipeline), apart from experts, and of its experts."""
    table, many = found.layer(0), found.workload.model.num_layers
    rest = found.embedding.parameters + found.head.parameters
    return rest + many * (table.parameters - table.expert_parameters), (
        many * table.expert_parameters
    )


@pytest.mark.parametrize("layout", [{"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 4, "ep": 1}])
@pytest.mark.parametrize("stage", [2, 3])
def test_experts_are_sharded_and_gathered_among_their_own_peers(
    stage: int, layout: dict[str, int]
) -> None:
    """Over dp / ep ranks; with one such rank their states are whole, and nothing of them moves."""
    found = given(zero_stage=stage, global_batch=8, **layout)
    (rest, experts), lay, system = counts(found), found.layout, found.system
    peers = lay.dp // lay.ep
    held, shard = evaluate(found, found.base_plan).ranks[0], -(-rest // lay.dp)
    whole = rest + experts if stage == 2 else shard + experts // peers
    assert held.parameter == system.states.param_bytes * whole
    assert held.gradient == system.states.grad_bytes * (shard + experts // peers)
    assert held.optimizer == system.states.optimizer_bytes * (shard + experts // peers)
    moved: Counter[tuple[str, str]] = Counter()
    for op in ("parameters", "gradients"):
        for comm in comms(found, op):
            moved[op, comm.group] += comm.nbytes
    passes = {2: 1, 3: 4}[stage]  # once in a step, or in each pass of two micro-batches
    assert moved["parameters", "dp"] == passes * system.states.gather_bytes * rest
    assert moved["gradients", "dp"] == 2 * system.states.reduce_bytes * rest
    assert moved["parameters", "edp"] == (passes * system.states.gather_bytes * experts) * (
        peers > 1
    )
    assert moved["gradients", "edp"] == (2 * system.states.reduce_bytes * experts) * (peers > 1)


@pytest.mark.parametrize(("ep", "buffers"), [(2, True), (4, False)])
def test_kernels_of_experts_read_a_buffer_of_their_own(ep: int, buffers: bool) -> None:
    found = given(zero_stage=3, ep=ep, model=replace(MIXTURE, num_layers=1))
    table, width = found.layer(0), found.system.states.gather_bytes
    walk = actions(found)
    allocs = {str(alloc.storage): alloc.nbytes for action in walk for alloc in action.allocs}
    rest = table.parameters - table.expert_parameters
    assert allocs["L0.parameters"] == width * rest
    assert allocs.get("L0.experts.parameters", 0) == width * table.expert_parameters * buffers
    kernels = [action for action in walk if action.stream == "compute"]
    for op in table.ops:
        reads = {n for a in kernels if (a.part, a.op) == ("L0", op.name) for n in a.reads}
        gathered = {str(each) for each in reads if each.role is Role.WEIGHTS}
        own = {"L0.experts.parameters"} if buffers else set()
        wanted = own if op.of_experts else {"L0.parameters"}
        assert gathered == (wanted if op.parameters else set()), op.name


def test_a_pipeline_holds_experts_that_have_peers() -> None:
    """Gathered once; with sums of all gradients, also of experts without peers."""
    for ep, peers in ((2, 2), (4, 1)):
        found = given(system="torchtitan", zero_stage=3, pp=2, ep=ep, global_batch=16)
        walk = actions(found)
        gathers = [comm for comm in comms(found, "parameters") if comm.group == "edp"]
        assert len(gathers) == found.workload.model.num_layers * (peers > 1)
        allocs = [alloc for action in walk for alloc in action.allocs]
        sums = {alloc.nbytes for alloc in allocs if str(alloc.storage) == "L0.sums^"}
        assert sums == {found.system.states.reduce_bytes * found.layer(0).parameters}


def test_the_executor_refuses_zero_2_and_3_with_experts_by_name() -> None:
    found = given(zero_stage=2)
    assert "ZeRO stages 2 and 3 with experts" in refusals(found, found.base_plan)


def test_sequence_parallel_ranks_sum_the_routers_gradients() -> None:
    both = {"tp": 2, "dp": 2, "ep": 2, "etp": 1, "global_batch": 2}
    norms = [
        sum(comm.nbytes for comm in comms(one, "norm_gradients"))
        for one in (given(**both), given(LLAMA, **both | {"ep": 1, "etp": None}))
    ]
    routers = 4 * 8 * LLAMA.hidden
    assert norms[0] - norms[1] == given().system.states.grad_bytes * routers


def test_the_allgather_dispatcher_gathers_all_tokens() -> None:
    found = given(system_changes={"dispatcher": "allgather"})
    count = found.workload.model.num_layers
    assert exchanges(found) == {
        (Kind.ALL_GATHER, "sort"): count,
        (Kind.REDUCE_SCATTER, "unsort"): count,
        (Kind.ALL_GATHER, "unsort"): count,
        (Kind.REDUCE_SCATTER, "sort"): count,
    }
    moved = {
        a.exchange.comm.nbytes
        for a in actions(found)
        if a.exchange.comm and a.exchange.comm.group == "ep"
    }
    assert moved == {4 * found.layer(0).activations["mlp_norm_out"].nbytes}
    assert found.layer(0).saved_bytes == given().layer(0).saved_bytes


@pytest.mark.parametrize("ep", [1, 4])
def test_the_host_waits_for_the_counts(ep: int) -> None:
    found = given(ep=ep)
    costs = ActionCosts(found)
    held = {(a.kind, a.op) for a in actions(found) if costs.held(a)}
    kind = Kind.ALL_GATHER if ep > 1 else Kind.FORWARD
    assert held == {(kind, COUNTS)}
    assert not any(ActionCosts(given(LLAMA, ep=1)).held(a) for a in actions(given(LLAMA, ep=1)))


@pytest.mark.parametrize("ep", [1, 4])
def test_the_host_knows_the_sizes_of_padded_experts(ep: int) -> None:
    found = given(ep=ep)
    work = replace(found.workload, capacity_factor=1.0, expert_padding="capacity")
    padded = remade(found, workload=work)
    costs = ActionCosts(padded)
    assert not any(costs.held(action) for action in actions(padded))
    assert (Kind.ALL_GATHER, COUNTS) not in exchanges(padded)
    with pytest.raises(LayoutError, match="moe_expert_capacity_factor must be set"):
        remade(found, workload=replace(work, capacity_factor=0.0))


def test_exchanges_are_a_part_of_the_step() -> None:
    found = given()
    program = lower(found.base_plan, found)
    step_s = evaluate(found, found.base_plan).step_s
    parts = parts_of(found, program, step_s)
    assert parts["ep"] > 0
    assert sum(parts.values()) == pytest.approx(step_s)
    assert simulate(program, ActionCosts(found, program)).step_s == pytest.approx(step_s)
    assert "experts balanced" in assumed(found)


@pytest.mark.parametrize(("method", "settings"), tables(__file__)["methods"])
def test_methods_free_bytes_of_experts(method: str, settings: dict[str, Any]) -> None:
    model = layers(8, SHARED)
    found = given(model, pp=4, tp=2, dp=2, ep=2, etp=1, global_batch=16)
    plan = plan_of(found, method, **settings)
    check(lower(plan, found))
    kept = sum(r.activation_peak for r in evaluate(found, found.base_plan).ranks)
    assert sum(r.activation_peak + r.pools for r in evaluate(found, plan).ranks) < kept


def test_modules_that_no_layer_has_are_refused() -> None:
    assert refusal(given(), "selective_recompute", modules=["mlp"]).endswith("test-llama has mlp")
    dense = given(LLAMA, ep=1)
    assert refusal(dense, "selective_recompute", modules=["moe_act"]).endswith("has moe_act")


@pytest.mark.parametrize("padding", ["none", "capacity"])
def test_graphs_end_where_experts_learn_their_sizes(padding: str) -> None:
    """Attention, router and counts are in a layer's graph, and experts with known sizes too."""
    model = replace(MIXTURE, num_layers=2)
    plain = (given(model, system_changes={"cuda_graphs": on}) for on in ("none", "layer"))
    work = {"expert_padding": padding, "capacity_factor": float(padding == "capacity")}
    eager, graphs = (remade(one, workload=replace(one.workload, **work)) for one in plain)
    names = [op.name for op in graphs.layer(0).ops]
    apart = {*names[names.index(COUNTS) + 1 :]} if padding == "none" else set[str]()
    assert {*uncaptured(graphs.system.kernels, graphs.workload, graphs.layer(0))} == apart
    peaks = [evaluate(one, one.base_plan).ranks[0].activation_peak for one in (eager, graphs)]
    table = graphs.layer(0)
    made = {name for op in table.ops if op.name in apart for name in op.outputs}
    kept = sum(table.activations[name].nbytes for name in table.saved if name not in made)
    share = graphs.calibration.common.graph_bytes_share
    assert 0 < peaks[1] - peaks[0] <= 2 * share * kept
    launched = [issued(one) for one in (eager, graphs)]
    first = names[0]
    for name, seconds in launched[0].items():
        inside = graphs.cost.host_launch_s if name == first else 0.0
        assert launched[1][name] == pytest.approx(seconds if name in apart else inside)


def issued(found: Problem) -> dict[str, float]:
    """The seconds in which a host issues each operator's kernels of a layer's forward."""
    costs = ActionCosts(found)
    return {
        action.op: costs.issue_s(action, 0)
        for action in actions(found)
        if action.kind is Kind.FORWARD and action.part.letter == "L"
    }


@pytest.mark.parametrize("method", ["", "twinflow", "deep_optimizer_states", "optimizer_offload"])
@pytest.mark.parametrize("stage", [0, 1])
def test_states_of_experts_on_the_host_are_those_of_their_peers(method: str, stage: int) -> None:
    """What leaves the device arrives in host memory, whether ZeRO shards experts apart or not."""
    layout: dict[str, Any] = {"dp": 4, "ep": 2, "zero_stage": stage}
    here = given(**layout)
    there = remade(
        given(**layout, system_changes={"optimizer_on_host": not method}),
        cluster=load_cluster("h100-80gb-dos"),
    )
    small = {"size": 4096} if method else {}
    whole = {"twinflow": {"ratio": 1.0}, "optimizer_offload": {"share": 1.0}}.get(method, {})
    plan = plan_of(there, method, **small, **whole) if method else there.base_plan
    check(lower(plan, there))
    kept, moved = (
        evaluate(one, of).ranks[0] for one, of in ((here, here.base_plan), (there, plan))
    )
    width = there.system.states.optimizer_bytes
    rest = (LLAMA.parameters - 4 * LLAMA.mlp_parameters(LLAMA.ffn)) + 4 * 8 * LLAMA.hidden
    experts = there.workload.model.num_layers * there.layer(0).expert_parameters
    updated = (rest // 4 + experts // 2) if stage else rest + experts
    assert kept.optimizer == pytest.approx(width * updated, rel=1e-3)
    assert moved.optimizer == 0
    assert moved.host_state >= width * updated * (1 - 1e-3)


def test_a_stack_leaves_fp32_weights_on_the_device_and_pins_by_tensor() -> None:
    """megatron-core's hybrid optimizer without the precision-aware one: 4 of 12 bytes stay."""
    facts = {"resident_bytes": 4, "host_tensors": True, "optimizer_on_host": True}
    found = given(dp=4, ep=2, zero_stage=1, system_changes=facts)
    plan = found.base_plan
    here = given(dp=4, ep=2, zero_stage=1)
    whole = evaluate(here, here.base_plan).ranks[0].optimizer
    held = evaluate(found, plan).ranks[0]
    assert held.optimizer * 3 == whole
    device = with_facts(found.system, optimizer_on_host=False)
    found = remade(found, cluster=load_cluster("h100-80gb-dos"), system=device)
    fate = {"share": 0.5, "visiting": 0.0, "slots": 0, "size": whole // 96}
    half = plan_of(found, "optimizer_offload", **fate)
    parted = evaluate(found, half).ranks[0]
    assert parted.optimizer == pytest.approx(whole * (1 + 1 / 3) / 2, rel=0.02)
    assert parted.host_state == pytest.approx(held.host_state / 2, rel=0.05)
    params = whole // 12
    assert 16 * params <= held.host_state <= 24 * params
