"""Tiles of an MLP that are computed again in their own backward, executed."""

import dataclasses

import pytest
from msgspec.structs import replace

from rematbench.evaluate.evaluation import evaluate
from rematbench.plan import Plan
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.torch.case import Case
from tests.problems import plan_of, problem
from tests.worlds.torch import cases, laws


def tiled(spec: str, **settings: int) -> Case:
    made = problem(
        model=cases.TINY, seq_len=cases.SEQ, global_batch=2, system_changes={"tiles_again": True}
    )
    work = replace(made.workload, precision="fp64")
    given = dataclasses.replace(made, workload=work, evaluator=evaluate)
    plan: Plan = plan_of(given, spec, **{f"mst.{name}": n for name, n in settings.items()})
    return Case(name=spec, problem=given, plan=plan, steps=2, gradients=True)


@pytest.mark.parametrize("spec", ["mst", "full_recompute+mst"])
def test_gradients_equal_autograd_and_bytes_the_ledger(spec: str) -> None:
    case = tiled(spec, mlp_chunks=4, head_chunks=2)
    result = laws.run_here(case)
    assert result.status == "ok", result.reason
    assert laws.gradient_error(case, result) < 1e-10
    assert not laws.bytes_differ(case, result)


def test_slices_of_heads_are_refused_by_name() -> None:
    case = tiled("mst", attention_chunks=2)
    assert refusals(case.problem, case.plan) == ["attention over slices of heads"]
