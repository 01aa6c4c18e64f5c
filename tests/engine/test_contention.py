"""What copies share: closed forms, laws, and that actions alone are what they were."""

from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.advise.bounds.probes import Prober
from rematbench.costs.collectives import GroupShape, network_bytes
from rematbench.costs.copies import NO_TRAFFIC, CopyTraffic, shared_link_bytes_per_s
from rematbench.costs.operators.ops import Comm
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.simulate.copy_contention import copy_traffic as crowd
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.evaluation import evaluate, evaluate_program
from rematbench.inputs.layout import Layout
from rematbench.plan import Offload, Plan
from rematbench.problem import Problem
from tests.cost_constants import ROUND
from tests.problems import (
    all_methods,
    by_layer,
    half,
    layers,
    make_problem,
    on,
    problem,
    remade,
    rule,
    transfers,
)
from tests.tables import tables


def chunked() -> tuple[Problem, Plan]:
    """Copies of whole chunks, out and in, beside the passes of a pipeline over nodes."""
    given = problem(model=layers(8), pp=4, global_batch=12)
    return given, transfers(given.base_plan.with_rules(half()))


def copied(given: Problem) -> Plan:
    """Three tensors of every layer, copied layer by layer."""
    return by_layer(given.base_plan.with_rules(rule(Offload(), "q", "k", "v")))


def layered() -> tuple[Problem, Plan]:
    given = problem(model=layers(6), global_batch=2)
    return given, copied(given)


def copy_traffic(given: Problem, plan: Plan) -> CopyTraffic:
    return crowd(given, lower(plan, given), action_seconds(given))


# -- rates ------------------------------------------------------------------------------------


def test_rates_in_closed_form() -> None:
    assert shared_link_bytes_per_s(20.0, 10.0, 5.0, 0.0, 0.0) == 20.0
    assert shared_link_bytes_per_s(20.0, 10.0, 5.0, 1.0, 0.0) == pytest.approx(10.0)
    assert shared_link_bytes_per_s(20.0, 10.0, 5.0, 0.5, 0.0) == pytest.approx(40.0 / 3.0)
    assert shared_link_bytes_per_s(20.0, 20.0, 5.0, 0.0, 0.1) == pytest.approx(20.0 / 1.1)
    assert shared_link_bytes_per_s(20.0, 20.0, 5.0, 0.0, 9.0) == pytest.approx(
        15.0
    )  # the NIC's part
    assert shared_link_bytes_per_s(20.0, 20.0, 30.0, 0.0, 9.0) == pytest.approx(10.0)  # half


@pytest.mark.parametrize(("kind", "expected"), tables(__file__)["crossing"])
def test_bytes_of_a_collective_that_cross_a_nic(kind: str, expected: float) -> None:
    """Eight ranks, four on each node, a NIC for each."""
    assert network_bytes(kind, 80.0, GroupShape(8, 4, 2), 4.0) == expected


def test_what_runs_beside_what() -> None:
    found = copy_traffic(*chunked())
    assert 0.5 < found.two_way_share < 1.0  # a pipeline's warm-up only sends out
    assert found.sent_per_d2h == found.received_per_h2d > 0.0
    found = copy_traffic(*layered())
    assert (found.two_way_share, found.sent_per_d2h) == (0.0, 0.0)
    assert found.kernel_delay_share > 0.0
    given = problem(pp=2, global_batch=4)
    assert copy_traffic(given, given.base_plan) == NO_TRAFFIC


def test_kernels_lose_the_rate_that_copies_take_of_the_device() -> None:
    """Bytes copied / reached HBM rate, spread over all kernels."""
    given, plan = layered()
    program = lower(plan, given)
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    alone, beside = action_seconds(given), action_seconds(given, program)
    kernels = [a for a, _, _ in program.ranks[0].actions() if a.kind in kinds]
    lost = sum(beside(a, 0) - alone(a, 0) for a in kernels)
    copies = (Kind.D2H, Kind.H2D)
    moved = sum(a.nbytes for a, _, _ in program.ranks[0].actions() if a.kind in copies)
    rate = given.cluster.hbm_bytes_per_s * given.cost.gpu.hbm_efficiency
    assert lost == pytest.approx(moved / rate)


def trailing() -> tuple[Problem, Plan]:
    """A pipeline with copies by layer: a forward's last copy runs on beside the next pass."""
    given = problem(model=layers(8), pp=4, global_batch=12)
    return given, copied(given)


def ringed() -> tuple[Problem, Plan]:
    """A ring between nodes whose NICs take more than half a link."""
    given = on(problem(model=layers(6), cp=2, global_batch=2), nic_bytes_per_s=1e11)
    return given, copied(given)


def test_a_copy_that_runs_into_a_backward_runs_beside_its_reloads() -> None:
    """Of two layers on each rank the second's copies do so, on every rank but the last, after each
    forward of the steady state and the last of the warm-up."""
    given, plan = trailing()
    program = lower(plan, given)
    copies = (Kind.D2H, Kind.H2D)
    moved = sum(a.nbytes for r in program.ranks for a, _, _ in r.actions() if a.kind in copies)
    layer = sum(
        action.nbytes
        for action in next(b for b in program.ranks[0].blocks if b.label == "F").actions
        if action.kind is Kind.D2H and action.part == "L0"
    )
    warm_up = (3, 2, 1)
    assert copy_traffic(given, plan).two_way_share == pytest.approx(
        sum(2 * layer * (12 - before) for before in warm_up) / moved
    )


def test_collectives_between_nodes_run_beside_copies() -> None:
    """ZeRO 3: a forward's copies meet the gathers of forwards; reloads meet what backwards gather
    and reduce."""
    given = problem(model=layers(6), dp=2, zero_stage=3, global_batch=4, system="torchtitan")
    plan = copied(given)
    found = copy_traffic(given, plan)
    program = lower(plan, given)
    rank = program.ranks[0]
    for label, kind, messages in (
        ("F", Kind.D2H, found.sent_per_d2h),
        ("B", Kind.H2D, found.received_per_h2d),
    ):
        steps = (rank.blocks[step.block] for step in rank.steps)
        inside = [a for block in steps if block.label == label for a in block.actions]
        sent = sum(
            action.exchange.comm.nbytes / 2
            for action in inside
            if action.exchange.comm and action.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
        )
        assert messages == pytest.approx(sent / sum(a.nbytes for a in inside if a.kind is kind))
        assert messages > 0.0
    one_node = on(given, gpus_per_node=2)
    assert copy_traffic(one_node, plan).sent_per_d2h == 0.0


def test_a_context_parallel_ring_between_nodes_runs_beside_copies() -> None:
    given, plan = ringed()
    found = copy_traffic(given, plan)
    assert found.sent_per_d2h > 0.0
    assert found.received_per_h2d > 0.0
    assert copy_traffic(on(given, gpus_per_node=2), plan).sent_per_d2h == 0.0


@pytest.mark.parametrize(("gpus", "sharing"), [(1, 1), (2, 2), (4, 4), (8, 4), (16, 4)])
def test_ranks_of_a_socket_share_its_memory(gpus: int, sharing: int) -> None:
    """Ranks fill a node's sockets in order: four of eight GPUs are all on the first of two."""
    given = problem(tp=min(gpus, 4), dp=max(1, gpus // 4), global_batch=4)
    node = on(given, gpus_per_node=8, numa_nodes=2, dram_bytes_per_s=4e9)
    common = node.calibration.common
    assert node.cost.copy_s(10**9, "d2h") == pytest.approx(
        common.copy_latency_s + 1e9 / (4e9 * common.dram_efficiency / sharing)
    )
    both = CopyTraffic(1.0, 0.0, 0.0, 0.0)
    slow = node.cost.copy_s(10**9, "h2d", both) - common.copy_latency_s
    assert slow == pytest.approx(1e9 / (4e9 * common.dram_efficiency / sharing / 2))


@pytest.mark.parametrize(("gpus", "sharing"), [(1, 1), (2, 2), (4, 2)])
def test_a_gpu_alone_on_its_link_has_all_of_it(gpus: int, sharing: int) -> None:
    links = {"pcie_gpus_per_link": 2, "pcie_bytes_per_s": 1e9, "dram_bytes_per_s": None}
    node = on(problem(tp=gpus), gpus_per_node=8, **links)
    common = node.calibration.common
    assert node.cost.copy_s(10**9, "d2h") == pytest.approx(
        common.copy_latency_s + sharing / common.pcie_efficiency
    )


# -- laws -------------------------------------------------------------------------------------

WORSE: list[dict[str, float]] = [
    {"dram_bytes_per_s": 1e9},
    {"h2d_beside_d2h": 0.1},
    {"d2h_beside_h2d": 0.1},
    {"pcie_bytes_per_s": 1e8},
]


@pytest.mark.parametrize("worse", WORSE, ids=lambda worse: next(iter(worse)))
@pytest.mark.parametrize("case", [chunked, layered, trailing, ringed])
def test_a_slower_host_never_makes_a_step_faster(case: Any, worse: dict[str, float]) -> None:
    given, plan = case()
    given = on(given, dram_bytes_per_s=None, pcie_bytes_per_s=1e9)
    assert evaluate(on(given, **worse), plan).step_s >= evaluate(given, plan).step_s


@pytest.mark.parametrize("case", [chunked, layered, trailing, ringed])
def test_with_infinite_rates_copies_are_as_if_alone(case: Any) -> None:
    """What kernels lose to HBM traffic is left; nothing else."""
    given, plan = case()
    given = on(given, dram_bytes_per_s=None, pcie_bytes_per_s=1e21)
    program = lower(plan, given)
    alone = simulate_chunks(program, action_seconds(given)).step_s
    found = evaluate(given, plan).step_s
    assert alone <= found <= alone * (1.0 + copy_traffic(given, plan).kernel_delay_share)


@pytest.mark.parametrize("case", [chunked, layered, trailing, ringed])
def test_both_simulators_see_the_same_crowd(case: Any) -> None:
    given, plan = case()
    program = lower(plan, given)
    by_op = evaluate_program(given, plan, program, record=True).step_s
    assert by_op == pytest.approx(evaluate(given, plan).step_s, rel=1e-12)


@pytest.mark.parametrize("gpus", [1, 2, 8, 16])
def test_probes_of_a_search_copy_as_fast_as_their_problem(gpus: int) -> None:
    """A probe has other ranks on a node, and may share its links with fewer or more of them."""
    given = make_problem(
        layout=Layout(pp=min(gpus, 2), dp=max(1, gpus // 2), global_batch=64),
        model="llama-7b",
        cluster="a800-80gb",
        system="megatron-core",
        seq_len=4096,
    )
    prober = Prober(given, {})
    prober(all_methods().resolve("full_recompute", None, given))
    for small in prober.smalls.values():
        assert small.problem.cost.copy_s(10**9, "d2h") == given.cost.copy_s(10**9, "d2h")


def lost_s(**changes: bool) -> tuple[float, float]:
    """What a pipeline of four stages of two chunks loses to collectives of states beside compute,
    and what a chunk's reduction slows."""
    found = []
    for stall in (0.0, 0.5):
        stack = replace(ROUND.systems["default"], dp_stall=stall)
        given = problem(
            model=layers(8), pp=4, vpp=2, dp=2, zero_stage=1, global_batch=16,
            system_changes={"p2p_overlap": "interleaved", "bucket_bytes": 1 << 40, **changes},
        )  # fmt: skip
        given = remade(given, calibration=replace(ROUND, systems={"default": stack}))
        found.append(evaluate(given, given.base_plan).step_s)
    width = given.system.states.reduce_bytes
    return found[1] - found[0], given.cost.stall_s(
        Comm("reduce_scatter", "dp", width * given.layer(0).trained), 1
    )


def test_a_stage_that_waits_for_a_message_loses_nothing_to_collectives() -> None:
    """A chunk's last reduction begins when the message to the stage before may leave, so a pipeline
    adds no stall of a stage to another's.  A rank's other chunk is slowed at most.  Gathers of a
    step end before the first message arrives."""
    lost, chunk = lost_s(reduce_overlap=True, gather_overlap=False)
    assert 0.0 < lost < chunk
    assert lost_s(reduce_overlap=False, gather_overlap=True)[0] == 0.0
