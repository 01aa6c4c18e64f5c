"""Quantised linears, executed in FP8 on a CPU: real bytes, and plans against keeping everything in
the same recipe."""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.evaluate.evaluation import evaluate
from rematbench.inputs.load import load_cluster
from rematbench.inputs.recipes import recipe_of
from rematbench.model import RecipeName
from rematbench.plan import MiniSequence
from rematbench.problem import Problem
from rematbench.workload import Work
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.torch import quantised
from rematbench.worlds.torch.case import Case, Result
from rematbench.worlds.torch.single_rank import trace_rank
from tests.problems import problem
from tests.worlds.torch import cases, grid, laws

LOCAL: tuple[RecipeName, ...] = ("fp8-block", "mxfp8")
RECIPES: tuple[RecipeName, ...] = ("fp8", "fp8-delayed", *LOCAL)
WHOLE = ("full", "offload", "skeletal", "memo", "full_recompute", "balanced_checkpointing")
FULL = pytest.mark.full
QUICK = {"fp8-block": ("full", "skeletal", "pieces"), "fp8": ("full",)}
"""Plans of recipes; a further one repeats what one of them shows."""
PIECES = MiniSequence(("fc1", "act", "mul", "fc2"), 4)
SEQ = 128


@cache
def narrow(recipe: RecipeName, *, gpt: bool = False, pp: int = 1) -> Problem:
    """Sequences of 128 tokens, so that pieces and fractions are blocks of 32 rows."""
    model = cases.TINY_GPT if gpt else cases.TINY
    made = problem(model=model, seq_len=SEQ, global_batch=4, micro_batch=2, pp=pp)
    work = replace(made.workload, precision="bf16", recipe=recipe)
    cluster = load_cluster("b200-180gb" if recipe == "mxfp8" else "h800-80gb")
    return dataclasses.replace(made, workload=work, cluster=cluster, evaluator=evaluate)


@cache
def run(recipe: RecipeName, how: str = "keep", *, gpt: bool = False) -> tuple[Case, Result]:
    made = narrow(recipe, gpt=gpt)
    if how == "pieces":
        plan = replace(made.base_plan, mini_sequences=(PIECES,))
    else:
        plan = grid.plan_by(how, made)
    case = Case(name=how, problem=made, plan=plan, steps=2, gradients=True)
    result = laws.run_here(case)
    assert result.status == "ok", result.reason
    return case, result


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gpt", [False, pytest.param(True, marks=FULL)])
def test_bytes_are_those_of_the_ledger(recipe: RecipeName, gpt: bool) -> None:
    case, result = run(recipe, gpt=gpt)
    assert not laws.bytes_differ(case, result)
    assert all(torch.isfinite(grad).all() for grad in result.gradients[0].values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_fake_tensors_have_the_bytes_of_the_ledger(recipe: RecipeName) -> None:
    made = narrow(recipe)
    found = trace_rank(made, made.base_plan, 0)
    rank = lower(made.base_plan, made).ranks[0]
    assert found.bytes_after == list(live_bytes(rank.actions()))


def quickly(recipe: RecipeName, how: str) -> Any:
    return pytest.param(recipe, how, marks=[] if how in QUICK.get(recipe, ()) else [FULL])


@pytest.mark.parametrize(
    ("recipe", "how"), [quickly(one, how) for one in LOCAL for how in (*WHOLE, "pieces")]
)
def test_plans_have_the_bits_of_keeping_everything(recipe: RecipeName, how: str) -> None:
    """Scales are local to rows, and pieces are whole blocks.  The products of pieces of the sums of
    weight gradients are other sums, so their bits may differ."""
    case, result = run(recipe, how)
    assert not laws.bytes_differ(case, result)
    _, kept = run(recipe)
    if how in WHOLE:
        assert laws.same_bits(result, kept)
    else:
        assert result.losses == pytest.approx(kept.losses, rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "how"),
    [quickly("fp8", how) for how in ("full", "offload-layers", "balanced_checkpointing")],
)
def test_tensors_with_one_scale_are_rebuilt_whole(recipe: RecipeName, how: str) -> None:
    assert laws.same_bits(run(recipe, how)[1], run(recipe)[1])


def test_a_recipe_changes_the_numbers_and_little() -> None:
    plain = dataclasses.replace(
        narrow("fp8"), workload=replace(narrow("fp8").workload, recipe="none")
    )
    kept = laws.run_here(Case(name="plain", problem=plain, plan=plain.base_plan, steps=2))
    for recipe in RECIPES:
        losses = run(recipe)[1].losses
        assert losses != kept.losses
        assert losses == pytest.approx(kept.losses, rel=0.02)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(64, 128), (40, 200), (1, 7)])
def test_bytes_say_what_the_narrow_form_says(recipe: RecipeName, shape: tuple[int, int]) -> None:
    """Rows of elements and scales; each element is within half a step of 2 ** -3 of its value."""
    form = recipe_of(Work(seq_len=1, recipe=recipe))
    assert form is not None
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    data, scale = quantised.packed(x, form)
    assert data.shape == (shape[0], form.row_bytes(shape[1]))
    found = quantised.widened(data, form, shape[1], scale, torch.bfloat16)
    assert torch.equal(found, quantised.narrowed(x, form))
    least = quantised.spread(quantised.scales_of(x, form), x.shape, form) * 2**-6
    assert ((found - x).abs() <= torch.maximum(x.abs() * 0.07, least)).all()


def test_what_is_not_executed_is_refused_by_name() -> None:
    made = narrow("fp8", pp=2)
    assert refusals(made, made.base_plan) == []
    split = problem(model=cases.TINY, seq_len=SEQ, global_batch=4, micro_batch=2, tp=2)
    work = replace(split.workload, recipe="fp8", fp8_params=True)
    split = dataclasses.replace(split, workload=work)
    shared = replace(work, recipe="fp8-delayed")
    peers = dataclasses.replace(problem(model=cases.TINY, dp=2, global_batch=4), workload=shared)
    assert "scales of earlier steps over data-parallel ranks" in refusals(peers, peers.base_plan)
    found = " ".join(refusals(split, split.base_plan))
    assert "quantised parameters" in found
    assert "quantised linears with tensor" in found
