"""The first rank of a pipeline runs without its neighbours: the same actions, bytes and compute."""

import math

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.program.ledger import live_bytes
from rematbench.engine.program.program import without_neighbours
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.host.gpu_state import GpuState
from rematbench.measure.torch.turns import Turns
from rematbench.worlds.torch.dispatch import Tracker
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.rank_model import NotExecutable
from rematbench.worlds.torch.single_rank import FirstStageGroups
from tests.worlds.torch import cases

CPU = torch.device("cpu")
PLANS = ("keep", "full", "offload-slots")


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_alone_has_the_ledgers_bytes_after_every_action(name: str) -> None:
    case = cases.case("pp4-vpp2", name)

    class Tracked(Executor):
        def __init__(self, *given: object, **known: object) -> None:
            super().__init__(*given, **known, tracker=Tracker())  # type: ignore[arg-type]

    executor = Turns(CPU, GpuState).executor(case.problem, case.plan, Tracked)
    executor.run_step()
    actions = list(lower(case.plan, case.problem).ranks[0].actions())
    assert executor.bytes_after == list(live_bytes(actions))
    assert all(math.isfinite(float(p.grad_flat.norm())) for p in executor.model.parameters.values())


def test_turns_of_a_rank_alone_and_of_another_model_share_no_weights() -> None:
    turns = Turns(CPU, GpuState)
    first, one = cases.case("pp4-vpp2", "keep"), cases.case("one", "keep")
    for case in (first, one, first):
        status, reason, seen = turns.turn(case.problem, case.plan)
        assert (status, reason, len(seen["step_s"]) > 0) == ("ok", "", True)
        names = set(turns.parameters)
        layers = sum(map(len, case.plan.partition[0]))
        assert len({n.split(".")[1] for n in names if n.startswith("layers.")}) == layers


def test_what_needs_peers_does_not_run_alone() -> None:
    problem = cases.case("tp2-pp2", "keep").problem
    with pytest.raises(NotExecutable, match="with tp 1, cp 1 and dp 1"):
        FirstStageGroups(problem.layout, problem.system.parallel.rank_order)


@pytest.mark.parametrize("name", PLANS)
def test_the_predicted_seconds_of_a_rank_alone_wait_for_nobody(name: str) -> None:
    case = cases.case("pp4-vpp2", name)
    program = lower(case.plan, case.problem)
    alone = without_neighbours(program)
    kinds = {action.kind for action, _, _ in alone.ranks[0].actions()}
    assert not kinds & {Kind.SEND, Kind.RECV}
    assert {Kind.SEND, Kind.RECV} <= {action.kind for action, _, _ in program.ranks[0].actions()}
    seconds = action_seconds(case.problem, alone)
    found = simulate_chunks(alone, seconds)
    assert found.step_s == pytest.approx(simulate(alone, seconds).step_s, rel=1e-9)
    whole = simulate(program, action_seconds(case.problem, program))
    busy = whole.busy_s(0, "compute")
    assert found.busy_s(0, "compute") == pytest.approx(busy, rel=0.02)  # messages beside kernels
    assert busy * 0.98 <= found.step_s < whole.step_s
