"""Turns share one model's weights and compute what an executor does."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch

from rematbench.engine.lowering.lower import lower
from rematbench.host.gpu_state import GpuState
from rematbench.measure.torch import turns
from rematbench.worlds.torch.batch import make_batch, micro_batches
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.groups import Groups
from rematbench.worlds.torch.rank_model import RankModel
from tests.worlds.torch import cases

CPU = torch.device("cpu")


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
