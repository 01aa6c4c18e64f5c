"""Low-rank adapters on frozen weights, executed: gradients, bytes, and what stays as it was."""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from rematbench.evaluate.evaluation import evaluate
from rematbench.problem import Problem
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.torch.case import Case, Result
from rematbench.worlds.torch.parameters import full_weight
from rematbench.worlds.torch.rank_model import RankModel
from tests.problems import problem
from tests.worlds.torch import cases, grid, laws

TOLERANCE = 1e-10
SETS: dict[str, dict[str, Any]] = {
    "all": {"lora_rank": 4},
    "q,v": {"lora_rank": 4, "lora_targets": "q,v"},
    "b": {"lora_rank": 4, "lora_train": "b"},
    "down": {"lora_rank": 4, "lora_targets": "down"},
    "dropped": {"lora_rank": 4, "lora_targets": "q,o,down", "lora_dropout": 0.25},
    "dropped b": {"lora_rank": 4, "lora_train": "b", "lora_dropout": 0.25},
}
PLANS = ("keep", "full", "offload", "rows", "skeletal", "mini", "mini-dropped")
METHODS = ("balanced_checkpointing", "mst+full_recompute", "mst")


@cache
def adapted(name: str, *, gpt: bool = False) -> Problem:
    model = cases.TINY_GPT if gpt else cases.TINY
    made = problem(model=model, seq_len=cases.SEQ, global_batch=4, micro_batch=2)
    work = replace(made.workload, precision="fp64", **SETS[name])
    return dataclasses.replace(made, workload=work, evaluator=evaluate)


def case_of(made: Problem, how: str) -> Case:
    plan = grid.plan_by(how, made)
    return Case(name=how, problem=made, plan=plan, steps=2, gradients=True)


@cache
def run(name: str, how: str = "keep", *, gpt: bool = False) -> tuple[Case, Result]:
    case = case_of(adapted(name, gpt=gpt), how)
    result = laws.run_here(case)
    assert result.status == "ok", result.reason
    return case, result


@pytest.mark.parametrize("gpt", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_gradients_of_adapters_equal_autograd_and_nothing_else_has_one(
    name: str, gpt: bool
) -> None:
    if gpt and name in ("all", "dropped b"):
        return  # an MLP without a gate has fewer linears, of which "down" is one
    case, result = run(name, gpt=gpt)
    trains = {"b"} if name.endswith("b") else {"a", "b"}
    assert {key.rpartition(".")[2] for key in result.gradients[0]} == trains
    assert all(float(grad.norm()) > 0 for grad in result.gradients[0].values())
    assert laws.gradient_error(case, result) < TOLERANCE
    assert not laws.bytes_differ(case, result)


@pytest.mark.parametrize("how", [*PLANS[1:], *METHODS])
@pytest.mark.parametrize("name", ["all", "dropped", pytest.param("b", marks=pytest.mark.full)])
def test_plans_are_lossless_against_keeping_the_same_trained_set(name: str, how: str) -> None:
    case, result = run(name, how)
    assert not laws.bytes_differ(case, result)
    _, kept = run(name)
    assert result.losses == pytest.approx(kept.losses, rel=TOLERANCE)
    for step, other in zip(result.gradients, kept.gradients, strict=True):
        for key, grad in step.items():
            assert float((grad - other[key]).norm()) <= TOLERANCE * float(other[key].norm())


def test_frozen_weights_stay_bit_by_bit_and_adapters_move() -> None:
    from rematbench.worlds.torch import worker  # noqa: PLC0415 - it starts no process here

    made = adapted("all")
    case = case_of(made, "keep")
    kept: list[RankModel] = []

    class Seen(RankModel):
        def __init__(self, *values: Any, **named: Any) -> None:
            super().__init__(*values, **named)
            kept.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "RankModel", Seen)
        laws.run_here(case)
    (model,) = kept
    for name, parameter in model.parameters.items():
        whole = full_weight(parameter.spec, case.seed)
        assert torch.equal(parameter.value, whole) != parameter.spec.trained, name
        assert bool(parameter.grad_flat.numel()) == parameter.spec.trained


def test_ranks_that_share_adapters_equal_autograd() -> None:
    """Of ZeRO 2 and 3 too, whose ranks share frozen weights and trained ones by themselves."""
    cases_of = []
    for name, stage, how in (
        *(("all", stage, "keep") for stage in range(4)),
        ("b", 3, "full"),
        ("dropped", 2, "mst+full_recompute"),
    ):
        made = problem(model=cases.TINY, seq_len=cases.SEQ, global_batch=4, dp=2, zero_stage=stage)
        work = replace(made.workload, precision="fp64", **SETS[name])
        made = dataclasses.replace(made, workload=work, evaluator=evaluate)
        cases_of.append(dataclasses.replace(case_of(made, how), name=f"{name} {stage} {how}"))
    for case, result in laws.launch(cases_of).values():
        assert result.status == "ok", result.reason
        assert laws.gradient_error(case, result) < TOLERANCE
        assert not laws.bytes_differ(case, result)


def test_what_is_not_executed_is_refused_by_name() -> None:
    made = adapted("all")
    work = replace(made.workload, lora_dropout=0.1, base_dtype="nf4")
    found = refusals(dataclasses.replace(made, workload=work), made.base_plan)
    assert found == ["frozen weights in nf4"]


def test_a_mask_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward without the mask has other gradients, below the adapter."""
    from rematbench.worlds.torch import operators  # noqa: PLC0415 - it starts no process here

    case = case_of(adapted("dropped"), "keep")
    through = {name: lambda call: {call.op.inputs[0]: call.grads[0]} for name in operators.DROPS}
    monkeypatch.setattr(operators, "BACKWARD_INPUT", operators.BACKWARD_INPUT | through)
    assert laws.gradient_error(case, laws.run_here(case)) > 1e-4


@pytest.mark.parametrize("how", ["keep", "mst+full_recompute"])
@pytest.mark.parametrize("rank", [0, 4])
def test_layers_that_share_weights_add_their_gradients(how: str, rank: int) -> None:
    """Also those of an adapter, which stands in the shared layer."""
    model = replace(cases.TINY, num_layers=4, layer_groups=2)
    made = problem(model=model, seq_len=cases.SEQ, global_batch=4, micro_batch=2)
    work = replace(made.workload, precision="fp64", lora_rank=rank)
    case = case_of(dataclasses.replace(made, workload=work, evaluator=evaluate), how)
    result = laws.run_here(case)
    assert result.status == "ok", result.reason
    assert laws.gradient_error(case, result) < TOLERANCE
    assert not laws.bytes_differ(case, result)
