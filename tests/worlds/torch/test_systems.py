"""Facts of a stack on the executor: what it saves, fused linears, outputs that a policy holds."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.evaluate.evaluation import evaluate, program_bytes
from rematbench.host.declared import flat
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_model, load_system, names
from rematbench.inputs.system import with_facts
from rematbench.plan import Plan, Recompute
from rematbench.problem import Problem
from rematbench.worlds.run_records import measured_ranks
from rematbench.worlds.torch.case import Case, RankResult
from rematbench.worlds.torch.rank_model import NotExecutable, require_executable
from rematbench.worlds.torch.single_rank import trace_rank
from tests.problems import ANY_LAYOUT, FULL, make_problem, plan_of, problem, rule
from tests.worlds.torch import cases, grid, laws
from tests.worlds.torch.test_faults import edited

SYSTEMS = ("deepspeed", "megatron-core", "megatron-lm", "torchtitan")


def dropping(plan: Plan) -> Plan:
    """Some outputs of the qkv and the gate/up linears are rebuilt, others kept."""
    return plan.with_rules(rule(Recompute(), "q", "gate_out", "attn_norm_out"))


def holding(plan: Plan) -> Plan:
    """The second MLP linear's output is cached though no backward reads it."""
    return replace(plan.with_rules(rule(Recompute(scope="layer"), "act_out")), held=("fc2_out",))


def check_both(case: Case) -> None:
    """Twin law and gradients of one in-process step."""
    (case,) = grid.short([case])
    result = laws.run_here(case)
    assert laws.bytes_differ(case, result) == []
    grid.check_gradients(case, result)


def case_of(system: str, edit: Callable[[Plan], Plan]) -> Case:
    given = cases.tiny("one", system=system)
    plan = edit(given.base_plan)
    return Case(name=system, problem=given, plan=plan, ignored=0.1, gradients=True)


@pytest.mark.parametrize("system", SYSTEMS)
def test_some_outputs_of_a_linear_are_rebuilt(system: str) -> None:
    check_both(case_of(system, dropping))


def test_stacks_differ_in_the_columns_that_recomputation_computes() -> None:
    def shares(system: str) -> set[float]:
        case = case_of(system, dropping)
        (rank,) = lower(case.plan, case.problem).ranks
        return {action.rows.columns for action, _, _ in rank.actions() if action.op == "qkv"}

    assert shares("megatron-core") == {1.0}
    assert len(shares("torchtitan")) == 2


def test_held_outputs_are_executed() -> None:
    held, plain = case_of("torchtitan", holding), case_of("torchtitan", lambda plan: plan)
    check_both(held)
    assert held.plan.held
    assert plain.plan.held == ()


EAGER = ("norm_keeps_steps", "eager_operators", "held_logit_bytes")
EVERY = [n for n in names("system") if not any(flat(load_system(n))[fact] for fact in EAGER)]
"""Stacks with eager operators are held to Transformers' own traces instead (tests/baselines): the
runtime's norms and caps are one operator each."""
OTHER_HEADS = ("deepspeed",)
"""Stacks whose states or losses are far from the runtime's, and that keep nothing of eager
operators."""
KEEPING = ("megatron-core", "deepspeed", "torchtitan")


def of_a_large_vocabulary(system: str) -> Problem:
    """Two layers: the head and the loss, which stacks run differently, are most of it."""
    model = replace(load_model("llama3-8b"), num_layers=2)
    lay, stack = Layout(tp=4, global_batch=1), with_facts(load_system(system), **ANY_LAYOUT)
    return make_problem(model=model, cluster="h100-80gb", system=stack, layout=lay, seq_len=8192)


@cache
def traced(system: str, full: bool) -> tuple[Problem, Plan, RankResult]:
    given = of_a_large_vocabulary(system)
    plan = given.base_plan.with_rules(*FULL) if full else given.base_plan
    return given, plan, trace_rank(given, plan)


@pytest.mark.parametrize(
    ("system", "full"), [*((name, True) for name in EVERY), *((name, False) for name in KEEPING)]
)
def test_total_peaks_are_held_to_what_the_runtime_runs(system: str, full: bool) -> None:
    """Saved tensors of the stack, states and kernels of the runtime."""
    given, plan, result = traced(system, full)
    (rank,) = measured_ranks(given, plan, [result], 1)
    assert rank.differing_actions == 0
    assert abs(rank.peak_error) <= 0.02
    assert rank.state_bytes == pytest.approx(rank.simulated_state_bytes, rel=0.02)


def test_eager_norms_that_keep_their_steps_are_refused_by_name() -> None:
    given = of_a_large_vocabulary("mst-hf")
    with pytest.raises(NotExecutable, match="tensors that eager operators of mst-hf keep"):
        require_executable(given, given.base_plan)


@pytest.mark.parametrize("system", OTHER_HEADS)
def test_the_stacks_own_totals_are_others(system: str) -> None:
    given, plan, result = traced(system, True)
    (own,) = program_bytes(given, plan, lower(plan, given))
    assert abs((result.peak_bytes + result.state_bytes) / own.device_peak - 1.0) > 0.02


# -- tiles of an MLP that are computed again in their own backward, executed -----------------------


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


# -- attention over slices of heads, executed ------------------------------------------------------

SLICES = {"ulysses2": (2,), "one": (2, 4)}
"""With 4 slices of 2 heads of keys, two slices share a head."""


def of_heads(layout: str, slices: int, spec: str = "mst", **changes: Any) -> Case:
    given = cases.tiny(layout, **changes)
    plan: Plan = plan_of(given, spec, **{"mst.attention_chunks": slices, "mst.mlp_chunks": 2})
    return Case(name=f"{layout} {slices}", problem=given, plan=plan, steps=1, gradients=True)


@pytest.mark.parametrize(("layout", "slices"), [(lay, n) for lay, ns in SLICES.items() for n in ns])
def test_slices_of_heads_are_exact(layout: str, slices: int) -> None:
    spec = "full_recompute+mst" if slices == 2 else "mst"
    model = cases.TINY if layout == "one" else replace(cases.TINY_GPT, num_kv_heads=2)
    case = of_heads(layout, slices, spec, model=model)
    ((_, result),) = laws.launch([case]).values()
    assert laws.gradient_error(case, result) < 1e-10
    assert not laws.bytes_differ(case, result)


def test_a_dropped_slice_of_heads_is_found() -> None:
    def drop(action: Action) -> list[Action]:
        weight = action.kind is Kind.BACKWARD_WEIGHT and action.op == "qkv"
        return [] if weight and action.rows.offset > 0 else [action]

    case = edited(of_heads("one", 2), drop)
    assert laws.gradient_error(case, laws.run_here(case)) > 1e-3
