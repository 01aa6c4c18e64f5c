"""What the harness promises of every directory of baselines/, before it has tests of its own."""

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.inputs.paths import data_dir
from rematbench.plan import Unsupported
from rematbench.problem import Problem
from rematbench.worlds.packages import flags
from rematbench.worlds.packages.flags import flags_of
from rematbench.worlds.packages.process import baselines, policy
from rematbench.worlds.records.record import run_spec
from tests.problems import GPT, problem, remade

NAMES = sorted(baselines())
PROBLEMS: dict[str, dict[str, Any]] = {
    "one": {},
    "unfused": {"model": GPT, "attention": "unfused", "global_batch": 2},
    "dp": {"dp": 2, "zero_stage": 2, "global_batch": 4},
    "vpp": {"pp": 2, "vpp": 2, "tp": 2, "global_batch": 4},
}


def made(name: str) -> Problem:
    return remade(problem(**PROBLEMS[name]), evaluator=evaluate)


def test_there_are_baselines_and_all_load() -> None:
    assert {"megatron_core", "deepspeed"} <= set(NAMES)
    assert all((data_dir("baselines") / name / "run.py").is_file() for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_says_claim_source_and_deviations(name: str) -> None:
    doc = baselines()[name].doc
    assert doc.startswith(f"{name}: ")
    for word in ("Claim:", "Source:", "Deviations:"):
        assert f"\n{word}" in doc


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_knows_no_framework(name: str) -> None:
    """plan.py and the files that it reads are loaded by the core; run.py and its neighbours never
    are."""
    plan = Path(baselines()[name].origin)
    loaded = ("options", "modules", "limits")
    files = [plan.with_name(f"{name}.py") for name in loaded]
    for path in filter(Path.exists, (plan, *files)):
        tree = ast.parse(path.read_text())
        named = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        modules = {
            f"{n.module}.{a.name}"
            if n.module == f"baselines.{plan.parent.name}"
            else n.module or ""
            for n in named
            for a in n.names
        }
        modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        beside = {f"baselines.{plan.parent.name}.{name}" for name in loaded}
        tops = {m.split(".")[0] for m in modules - beside}
        assert not tops & {"torch", "megatron", "deepspeed", "baselines"}


@pytest.mark.parametrize("name", NAMES)
def test_run_has_the_four_functions(name: str) -> None:
    tree = ast.parse((data_dir("baselines") / name / "run.py").read_text())
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert {"stack", "refuse", "execute", "trace"} <= defined


@pytest.mark.parametrize("where", PROBLEMS)
@pytest.mark.parametrize("name", NAMES)
def test_every_candidate_plans_lowers_and_is_safe(name: str, where: str) -> None:
    p = made(where)
    for candidate in baselines()[name].cls.candidates(p):
        plan = candidate.plan(p, p.base_plan)
        if not isinstance(plan, Unsupported):
            check(lower(plan, p))
        assert candidate.flags(p)


@pytest.mark.parametrize("name", NAMES)
def test_its_own_plans_are_equal_to_its_flags(name: str) -> None:
    """Which facts of the stack act beside the options is a question of its own (test_flags.py)."""
    p = made("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "assumed_facts", lambda *_: ())
        for candidate in baselines()[name].cls.candidates(p):
            answer = flags_of(p, candidate.plan(p, p.base_plan), name)
            assert not answer.missing, candidate


@pytest.mark.parametrize("where", PROBLEMS)
@pytest.mark.parametrize("name", NAMES)
def test_a_problem_that_no_option_says_has_its_reasons(name: str, where: str) -> None:
    """One line each; without them there is a policy that is planned."""
    p, own = made(where), baselines()[name].cls
    plans = [candidate.plan(p, p.base_plan) for candidate in own.candidates(p)]
    assert own.inexpressible(p) or not any(isinstance(plan, Unsupported) for plan in plans)
    assert all(reason and "\n" not in reason for reason in own.inexpressible(p))


@pytest.mark.parametrize("name", NAMES)
def test_settings_survive_the_run_spec(name: str) -> None:
    method = policy(name)
    spec = run_spec(made("one"), method, "executed")
    assert msgspec.convert(spec.parameters[name], baselines()[name].cls) == method.methods[0]


def test_an_unknown_baseline_or_setting_is_one_clear_line() -> None:
    with pytest.raises(ValueError, match="unknown baseline 'megatron'"):
        policy("megatron")
    with pytest.raises(ValueError, match="has no setting 'recompte'"):
        policy("megatron_core", {"recompte": "full"})


def test_the_shipped_points_load_and_have_their_cells() -> None:
    from rematbench.paper.studies.baseline_points import load_points, published  # noqa: PLC0415

    points = load_points()
    assert len({point.name for point in points}) == len(points)
    for point in points:
        assert point.problem.layout == point.layout
        assert published(point) or not point.cell


def test_the_folder_is_named_after_the_baseline() -> None:
    for name, entry in baselines().items():
        assert Path(entry.origin).parent.name == name
