"""What copies share: closed forms, laws, and that actions alone are what they were."""

from dataclasses import replace as replaced
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.cost.copies import ALONE, Crowd, crowded_bytes_per_s
from rematbench.lowering.lower import lower
from rematbench.plan import Offload, Plan
from rematbench.problem import Problem
from rematbench.program.action import Kind
from rematbench.simulate.contention import crowd
from rematbench.simulate.evaluate import evaluate, evaluate_program
from rematbench.simulate.max_plus import simulate_chunks
from rematbench.simulate.seconds import action_seconds
from tests.problems import by_layer, half, layers, problem, rule, transfers


def on(given: Problem, **changes: Any) -> Problem:
    return replaced(given, cluster=replace(given.cluster, **changes), _memo={}, _weights={})


def chunked() -> tuple[Problem, Plan]:
    """Copies of whole chunks, out and in, beside the passes of a pipeline over nodes."""
    given = problem(model=layers(8), pp=4, global_batch=12)
    return given, transfers(given.base_plan.with_rules(half()))


def layered() -> tuple[Problem, Plan]:
    given = problem(model=layers(6), global_batch=2)
    return given, by_layer(given.base_plan.with_rules(rule(Offload(), "q", "k", "v")))


def crowd_of(given: Problem, plan: Plan) -> Crowd:
    return crowd(given, lower(plan, given), action_seconds(given))


# -- rates ------------------------------------------------------------------------------------


def test_rates_in_closed_form() -> None:
    assert crowded_bytes_per_s(20.0, 10.0, 5.0, 0.0, 0.0) == 20.0
    assert crowded_bytes_per_s(20.0, 10.0, 5.0, 1.0, 0.0) == pytest.approx(10.0)
    assert crowded_bytes_per_s(20.0, 10.0, 5.0, 0.5, 0.0) == pytest.approx(40.0 / 3.0)
    assert crowded_bytes_per_s(20.0, 20.0, 5.0, 0.0, 0.1) == pytest.approx(20.0 / 1.1)
    assert crowded_bytes_per_s(20.0, 20.0, 5.0, 0.0, 9.0) == pytest.approx(15.0)  # the NIC's part


def test_what_runs_beside_what() -> None:
    found = crowd_of(*chunked())
    assert 0.5 < found.both < 1.0  # a pipeline's warm-up only sends out
    assert found.sent_per_d2h == found.received_per_h2d > 0.0
    found = crowd_of(*layered())
    assert (found.both, found.sent_per_d2h) == (0.0, 0.0)
    assert found.drawn > 0.0
    given = problem(pp=2, global_batch=4)
    assert crowd_of(given, given.base_plan) == ALONE


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


def test_ranks_of_a_socket_share_its_memory() -> None:
    given = problem(tp=4)
    node = on(given, gpus_per_node=4, numa_nodes=2, dram_bytes_per_s=4e9)
    common = node.calibration.common
    assert node.cost.copy_s(10**9, "d2h") == pytest.approx(
        common.copy_latency_s + 1e9 / (4e9 * common.dram_efficiency / 2)
    )
    both = Crowd(1.0, 0.0, 0.0, 0.0)
    slow = node.cost.copy_s(10**9, "h2d", both) - common.copy_latency_s
    assert slow == pytest.approx(1e9 / (4e9 * common.dram_efficiency / 4))


# -- laws -------------------------------------------------------------------------------------

WORSE: list[dict[str, float]] = [
    {"dram_bytes_per_s": 1e9},
    {"h2d_beside_d2h": 0.1},
    {"d2h_beside_h2d": 0.1},
    {"pcie_bytes_per_s": 1e8},
]


@pytest.mark.parametrize("worse", WORSE, ids=lambda worse: next(iter(worse)))
@pytest.mark.parametrize("case", [chunked, layered])
def test_a_slower_host_never_makes_a_step_faster(case: Any, worse: dict[str, float]) -> None:
    given, plan = case()
    given = on(given, dram_bytes_per_s=None, pcie_bytes_per_s=1e9)
    assert evaluate(on(given, **worse), plan).step_s >= evaluate(given, plan).step_s


@pytest.mark.parametrize("case", [chunked, layered])
def test_with_infinite_rates_copies_are_as_if_alone(case: Any) -> None:
    """What kernels lose to HBM traffic is left; nothing else."""
    given, plan = case()
    given = on(given, dram_bytes_per_s=None, pcie_bytes_per_s=1e21)
    program = lower(plan, given)
    alone = simulate_chunks(program, action_seconds(given)).step_s
    found = evaluate(given, plan).step_s
    assert alone <= found <= alone * (1.0 + crowd_of(given, plan).drawn)


@pytest.mark.parametrize("case", [chunked, layered])
def test_both_simulators_see_the_same_crowd(case: Any) -> None:
    given, plan = case()
    program = lower(plan, given)
    by_op = evaluate_program(given, plan, program, op_level=True).step_s
    assert by_op == pytest.approx(evaluate(given, plan).step_s, rel=1e-12)
