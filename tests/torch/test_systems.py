"""Facts of a stack on the executor: what it saves, fused linears, outputs that a policy holds."""

from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch
from msgspec.structs import replace

from rematbench.lower import lower
from rematbench.plan import Plan, Recompute
from rematbench.torch import worker
from rematbench.torch.case import Case
from rematbench.torch.gather import combine
from tests.problems import rule
from tests.torch import cases, grid, laws

SYSTEMS = ("deepspeed", "megatron-core", "megatron-lm", "mst-hf", "torchtitan")


def dropping(plan: Plan) -> Plan:
    """Some outputs of the qkv and the gate/up linears are rebuilt, others kept."""
    return plan.with_rules(rule(Recompute(), "q", "gate_out", "attn_norm_out"))


def holding(plan: Plan) -> Plan:
    """The second MLP linear's output is cached though no backward reads it."""
    return replace(plan.with_rules(rule(Recompute(scope="layer"), "act_out")), held=("fc2_out",))


def check_both(case: Case) -> None:
    """Twin law and gradients of one in-process step."""
    (case,) = grid.short([case])
    result = combine(case, [worker.run_case(case, 0, torch.device("cpu"), {})])
    assert laws.bytes_differ(case, result) == []
    grid.check_gradients(case, result)


def case_of(system: str, edit: Callable[[Plan], Plan]) -> Case:
    given = cases.tiny("one", system=system)
    plan = edit(given.base_plan)
    return Case(name=system, problem=given, plan=plan, ignored=0.1, gradients=True)


@pytest.mark.parametrize("system", SYSTEMS)
def test_some_outputs_of_a_linear_are_rebuilt(system: str) -> None:
    check_both(case_of(system, dropping))


def test_stacks_differ_in_the_columns_that_a_rerun_computes() -> None:
    def shares(system: str) -> set[float]:
        case = case_of(system, dropping)
        (rank,) = lower(case.plan, case.problem).ranks
        return {action.columns for action, _, _ in rank.actions() if action.op == "qkv"}

    assert shares("megatron-core") == {1.0}
    assert len(shares("torchtitan")) == 2


def test_held_outputs_are_executed() -> None:
    held, plain = case_of("torchtitan", holding), case_of("torchtitan", lambda plan: plan)
    check_both(held)
    assert held.plan.held
    assert plain.plan.held == ()
