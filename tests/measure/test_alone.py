"""The first rank of a pipeline runs without its neighbours: the same actions, bytes and compute."""

import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.ledger import live_bytes
from rematbench.engine.program.program import without_neighbours
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.host.gpu_state import GpuState
from rematbench.measure.torch import turns
from rematbench.measure.torch.turns import Turns
from rematbench.worlds.torch.batch import make_batch, micro_batches
from rematbench.worlds.torch.dispatch import Tracker
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.groups import Groups
from rematbench.worlds.torch.rank_model import NotExecutable, RankModel
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
    shared = cases.case("pp2", "vocab-1")
    _, reason, _ = Turns(CPU, GpuState).turn(shared.problem, shared.plan)
    assert "a stage cannot run alone if stages share the vocabulary" in reason


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


# -- turns share one model's weights and compute what an executor does -----------------------------


def test_turns_train_one_model_and_compute_what_an_executor_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "TIMED_S", 0.0)  # one timed step
    plans = [cases.case("one", name).plan for name in ("keep", "full")]
    problem = cases.case("one", "keep").problem
    by_turns = turns.Turns(CPU, GpuState)
    for plan in plans:
        status, reason, seen = by_turns.turn(problem, plan)
        assert (status, reason, len(seen["step_s"])) == ("ok", "", 1)
    groups = Groups(problem.layout, problem.system.parallel.rank_order, 0)
    model = RankModel(problem, plans[0], groups.place, CPU, turns.SEED)
    batch = make_batch(problem.workload, problem.layout.global_batch, turns.SEED, 0)
    model.batches = micro_batches(batch, problem.layout, groups.place, CPU)
    for plan in plans:  # a turn: a warm-up and a step, by an optimizer that begins
        alone = Executor(lower(plan, problem).ranks[0], model, groups, optimizer=turns.RULE)
        alone.run_step()
        alone.run_step()
    for name, parameter in model.parameters.items():
        assert torch.equal(parameter.flat, by_turns.parameters[name].flat), name


def test_a_turn_that_fails_says_why_and_the_next_one_runs() -> None:
    problem, plan = (cases.case("one", "keep").problem, cases.case("one", "keep").plan)
    by_turns = turns.Turns(CPU, GpuState)
    broken = cases.case("pp2", "keep").plan
    status, reason, seen = by_turns.turn(problem, broken)
    assert (status, bool(reason), seen) == ("failed", True, {})
    assert by_turns.turn(problem, plan)[0] == "ok"


def test_a_turns_weights_are_drawn_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host took half a minute of a GPU's time for 2.8 billion weights."""
    asked: list[bool] = []
    made = turns.RankModel

    def noted(*given: Any, **known: Any) -> RankModel:
        asked.append(known["device_weights"])
        return made(*given, **known)

    monkeypatch.setattr(turns, "RankModel", noted)
    case = cases.case("one", "keep")
    turns.Turns(CPU, GpuState).executor(case.problem, case.plan)
    assert asked == [True]


# -- what recomputation makes and nobody keeps needs no whole tensor (it was 1 GiB at 128K tokens)


def test_the_last_sum_of_a_recomputed_layer_is_made_in_pieces() -> None:
    case = cases.case("one", "full")
    tracker, rises = Tracker(), []

    class Watched(Executor):
        def __init__(self, *given: Any, **known: Any) -> None:
            super().__init__(*given, **known, tracker=tracker)

        def _act(self, action: Action, micro_batch: int, chunk: int) -> None:
            tracker.device_peak_bytes = tracker.device_bytes
            super()._act(action, micro_batch, chunk)
            if (action.kind, action.op) == (Kind.RECOMPUTE, "mlp_add"):
                assert not action.allocs
                rises.append(tracker.device_peak_bytes - tracker.device_bytes)

    executor = Turns(torch.device("cpu"), GpuState).executor(case.problem, case.plan, Watched)
    executor.run_step()
    boundary = executor.model.chunks[0].boundary
    layers = case.problem.workload.model.num_layers
    assert len(rises) == layers * case.problem.layout.num_micro_batches
    assert 0 < max(rises) <= boundary.nbytes / 8
