"""Test functions shared by the modules of one, two and four processes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.inputs.system import with_facts
from rematbench.plan import Plan
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.worlds.run_records import compared
from rematbench.worlds.torch.case import Case, Result
from tests.problems import all_methods, plan_of, remade
from tests.worlds.torch import cases, laws

Launch = Callable[[Sequence[Case]], dict[str, tuple[Case, Result]]]
TOLERANCE = 1e-10
SINGLE = 1e-5
"""The gradient law in fp32."""


def method_cases(layout: str, only: Sequence[str] = ()) -> list[Case]:
    """Every method in methods/ that has a plan for the layout (or only some)."""
    registry, found = all_methods(), []
    for name in registry.methods:
        if only and name not in only:
            continue
        made = cases.method_case(layout, name, composed(name))
        if isinstance(made, Case):
            found.append(made)
    return found


def composed(name: str) -> Composition:
    """`a+b` with the settings that make each of them do something at these sizes."""
    pairs = [
        (f"{part}.{key}", value)
        for part in name.split("+")
        for key, _, value in (word.partition("=") for word in laws.settings().get(part, "").split())
    ]
    return all_methods().resolve(name, dict(pairs))


def composed_cases(layout: str, names: Sequence[str] = laws.COMPOSITIONS) -> list[Case]:
    """Compositions that have a plan for the layout; it must lower."""
    found = []
    for name in names:
        made = cases.method_case(layout, name, composed(name))
        if isinstance(made, Case):
            lower(made.plan, made.problem)
            found.append(made)
    return found


def in_groups(layout: str) -> list[Case]:
    """Layers run again in groups of two, their MLPs in pieces, composed both ways."""
    settings = {"full_recompute.num_layers": 2, "mst.mlp_chunks": 3}
    registry, found = all_methods(), []
    for name in ("full_recompute+mst", "mst+full_recompute"):
        if not registry.methods.keys() >= set(name.split("+")):
            continue
        made = cases.method_case(layout, name, registry.resolve(name, settings))
        assert isinstance(made, Case), made
        found.append(made)
    return found


def short(found: list[Case]) -> list[Case]:
    """The same with one optimizer step: bytes, losses and gradients of the first."""
    return [replace(case, steps=1) for case in found]


def on_gpus(case: Case) -> Case:
    """The same on CUDA, with kernels that give the same bits every time."""
    return replace(case, device="cuda", deterministic=True, timed_steps=1)


def in_order(case: Case, *order: str) -> Case:
    """The same with ranks counted along these dimensions, the first fastest."""
    system = with_facts(case.problem.system, rank_order=order)
    name = f"{case.name} {','.join(order)}"
    return replace(case, name=name, problem=remade(case.problem, system=system))


def raw_cases(layout: str, *plans: str) -> list[Case]:
    """Raw plans on a layout, float64."""
    return [cases.case(layout, plan) for plan in plans or cases.PLANS]


def bitwise_cases(layout: str) -> list[Case]:
    """fp32 runs that must give keep's bits."""
    made = [cases.case(layout, plan, precision="fp32") for plan in ("keep", *cases.SAME_NUMBERS)]
    return [replace(c, name=f"fp32 {c.name}") for c in made]


def tests_of(made: list[Case], start: Launch) -> tuple[Callable[..., None], ...]:
    """Tests of a module: one launch of all its cases, and the laws of each."""
    names = [case.name for case in made]

    @cache
    def results() -> dict[str, tuple[Case, Result]]:
        return start(made)

    @pytest.mark.parametrize("name", names)
    def twin(name: str) -> None:
        check_twin(*results()[name])

    @pytest.mark.parametrize("name", names)
    def gradients(name: str) -> None:
        check_gradients(*results()[name])

    @pytest.mark.parametrize("name", [name for name in names if name.startswith("fp32")])
    def bits(name: str) -> None:
        keep = results()[f"fp32 {name.split()[1]} keep"][1]
        assert laws.same_bits(results()[name][1], keep)

    return twin, gradients, bits


def check_twin(case: Case, result: Result) -> None:
    """Bytes equal the ledger's after every action of every rank; what should move, moved."""
    assert result.status == "ok", result.reason
    assert laws.bytes_differ(case, result) == []
    plan = case.name.split()[-1]
    if plan.startswith("offload") or plan in ("rows", "skeletal", "memo", "pp_offload"):
        assert sum(rank.offload_bytes for rank in result.ranks) > 0
    if "lynx" in plan:  # norms alone are no matrix products
        ranks = (case.program or lower(case.plan, case.problem)).ranks
        assert any(a.kind is Kind.RECOMPUTE for rank in ranks for a, _, _ in rank.actions())
    if plan in ("full", "rows", "skeletal", "windows", "mini-dropped", "full_recompute"):
        assert sum(rank.recompute_flop for rank in result.ranks) > 0


def plan_by(name: str, given: Problem) -> Plan:
    """The raw plan of a name, or the plan of the methods that it names."""
    if name in cases.PLANS:
        return cases.PLANS[name](given.base_plan)
    found = composed(name).plan(given, given.base_plan)
    assert isinstance(found, Plan), found
    return found


def one_step(name: str, given: Problem, method: tuple[str, dict[str, Any]]) -> Case:
    """One step of a method with its settings."""
    plan = plan_of(given, method[0], **method[1])
    return Case(name=name, problem=given, plan=plan, steps=1, ignored=0.1, gradients=True)


def check_step(case: Case, result: Result, keep: Result | None = None) -> None:
    """Bytes after every action, losses and gradients; and against keep_all."""
    check_twin(case, result)
    check_gradients(case, result)
    if keep is not None:
        assert compared(case.problem, result, keep, "keep_all").lossless
        norms = zip(result.gradient_norms, keep.gradient_norms, strict=True)
        assert all(a == pytest.approx(b, rel=TOLERANCE) for a, b in norms)


def check_gradients(case: Case, result: Result) -> None:
    """Losses and every gradient of three AdamW steps equal the autograd model's.  In fp32, where
    AdamW amplifies rounding (test_rounding.py), those of the model in float64 at the weights that
    the run's own gradients lead to."""
    assert result.status == "ok", result.reason
    single = case.problem.workload.precision == "fp32"
    tolerance = SINGLE if single else TOLERANCE
    want = laws.exact_along(case, result) if single else laws.reference_of(case)
    assert laws.differs(case, result, want) <= tolerance
