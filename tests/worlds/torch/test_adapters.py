"""Low-rank adapters on frozen weights, executed: gradients, bytes, and what stays as it was."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import evaluate
from rematbench.inputs.system import with_facts
from rematbench.problem import Problem
from rematbench.workload import PACKED_BYTES, PACKINGS
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.torch.case import Case, Result
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.operands import Call
from rematbench.worlds.torch.packed import nbytes, packed, widen
from rematbench.worlds.torch.parameters import full_weight
from rematbench.worlds.torch.rank_model import RankModel
from tests.problems import problem, remade
from tests.tables import tables
from tests.worlds.torch import cases, grid, laws

TOLERANCE = 1e-10
SETS: dict[str, dict[str, Any]] = tables(__file__)["sets"]
LOSSLESS = (
    *("full", "offload", "rows", "skeletal", "mini", "mini-dropped"),
    *("balanced_checkpointing", "mst+full_recompute", "mst"),
)
QUICK = {"all": ("rows",), "dropped": LOSSLESS, "nf4": ("skeletal", "mini-dropped", "mst")}
FULL = pytest.mark.full


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
    if gpt and name in ("all", "dropped b", "nf4"):
        return  # an MLP without a gate has fewer linears, of which "down" is one
    case, result = run(name, gpt=gpt)
    trains = {"b"} if name.endswith("b") else {"a", "b"}
    assert {key.rpartition(".")[2] for key in result.gradients[0]} == trains
    assert all(float(grad.norm()) > 0 for grad in result.gradients[0].values())
    assert laws.gradient_error(case, result) < TOLERANCE
    assert not laws.bytes_differ(case, result)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=[] if how in QUICK.get(name, ()) else [FULL])
        for name in ("all", "dropped", "nf4", "b", "int8 b")
        for how in LOSSLESS
    ],
)
def test_plans_are_lossless_against_keeping_the_same_trained_set(name: str, how: str) -> None:
    case, result = run(name, how)
    assert not laws.bytes_differ(case, result)
    _, kept = run(name)
    assert result.losses == pytest.approx(kept.losses, rel=TOLERANCE)
    for step, other in zip(result.gradients, kept.gradients, strict=True):
        for key, grad in step.items():
            assert float((grad - other[key]).norm()) <= TOLERANCE * float(other[key].norm())


@pytest.mark.parametrize("name", ["all", "nf4"])
def test_frozen_weights_stay_bit_by_bit_and_adapters_move(name: str) -> None:
    from rematbench.worlds.torch import worker  # noqa: PLC0415 - it starts no process here

    case = case_of(adapted(name), "keep")
    kept: list[RankModel] = []

    class Seen(RankModel):
        def __init__(self, *values: Any, **named: Any) -> None:
            super().__init__(*values, **named)
            kept.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "RankModel", Seen)
        laws.run_here(case)
    (model,) = kept
    for parameter in model.parameters.values():
        whole = full_weight(parameter.spec, case.seed).view(-1)
        if packing := parameter.spec.packing:
            whole = packed(whole, packing)
        assert torch.equal(parameter.flat, whole) != parameter.spec.trained
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
    for facts, reason in (
        ({"base_dtype": "int4_ungrouped"}, "frozen weights in int4_ungrouped"),
        ({"base_dtype": "bf16"}, "frozen weights in bf16"),
    ):
        work = replace(made.workload, lora_dropout=0.1, **facts)
        found = refusals(dataclasses.replace(made, workload=work), made.base_plan)
        assert found == [reason]


def test_a_mask_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward without the mask has other gradients, below the adapter."""
    from rematbench.worlds.torch import operators  # noqa: PLC0415 - it starts no process here

    case = case_of(adapted("dropped"), "keep")
    for name in operators.DROPS:
        through = operators.OPERATORS[name]._replace(
            backward=lambda call: {call.op.inputs[0]: call.grads[0]}
        )
        monkeypatch.setitem(operators.OPERATORS, name, through)
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


@pytest.mark.parametrize(
    ("name", "error"),
    [("nf4", 0.16), ("nf4_double", 0.17), ("int4", 1 / 15), ("marlin", 1 / 14), ("int8", 1 / 255)],
)
def test_a_packed_weight_has_the_bytes_of_its_format(name: str, error: float) -> None:
    """Half a step of the codes is the largest error, against the largest value of a block: half of
    the widest gap of NF4 (0.152), of 15 or 255 steps from the least to the largest, of 7 steps;
    and 16 bits round a scale."""
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data, packing = packed(weight, name), PACKINGS[name]
    assert data.numel() == nbytes(weight.numel(), packing) == PACKED_BYTES[name] * weight.numel()
    wide = widen(data, name, torch.empty_like(weight))
    blocks = weight.view(-1, packing.block)
    wrong = (wide - weight).abs().view(blocks.shape).amax(1) / blocks.abs().amax(1)
    assert 0 < float(wrong.max()) < error + 2**-11
    for ragged in (weight[:3, :50], weight.repeat(2, 1)[:129]):  # a part of a block; odd many
        again = widen(packed(ragged, name), name, torch.empty_like(ragged).contiguous())
        assert float((again - ragged).abs().max() / ragged.abs().max()) < error + 2**-11


@pytest.mark.parametrize(
    ("name", "fused", "how"),
    [
        *(("nf4", True, "keep"), ("nf4", False, "mst+full_recompute"), ("int8 b", True, "keep")),
        pytest.param("nf4", True, "mst+full_recompute", marks=FULL),
        pytest.param("int8 b", False, "mst+full_recompute", marks=FULL),
    ],
)
def test_a_packed_weight_is_widened_at_each_use_in_the_bytes_of_the_lowering(
    name: str, fused: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = adapted(name)
    system = with_facts(made.system, fused_linears=fused)
    case = dataclasses.replace(case_of(remade(made, system=system), how), steps=1)
    case = dataclasses.replace(case, plan=grid.plan_by(how, case.problem))
    program, seen = lower(case.plan, case.problem), list[list[int]]()
    act, widened = Executor._act, Call.widened

    def acting(self: Executor, *values: Any) -> None:
        seen.append([])
        act(self, *values)

    def widening(self: Call, names: Sequence[str]) -> Call:
        call = widened(self, names)
        seen[-1] += [sum(one.nbytes for one in call.wide.values())]
        return call

    monkeypatch.setattr(Executor, "_act", acting)
    monkeypatch.setattr(Call, "widened", widening)
    result = laws.run_here(case)
    assert not laws.bytes_differ(case, result)
    linears = ("qkv", "proj", "fc1", "fc2")
    actions = [action for action, _, _ in program.ranks[0].actions()]
    assert len(actions) == len(seen)
    wanted = [a.scratch if a.op in linears else 0 for a in actions]
    if fused:
        assert [sum(sizes) for sizes in seen] == wanted
    else:  # q, k and v one after another, and then the sums of adapters
        assert all(max(sizes, default=0) <= want for sizes, want in zip(seen, wanted, strict=True))
        assert {len(sizes) for sizes in seen} == {0, 1, 2, 3}
