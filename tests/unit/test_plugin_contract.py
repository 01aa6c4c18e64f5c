"""Every file of methods/: what the harness promises of a method, before it has tests of its own."""

import ast
import inspect
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rematbench.check import check
from rematbench.discover import discover
from rematbench.evaluate import evaluate
from rematbench.ledger import issue_order
from rematbench.lower import lower
from rematbench.paths import data_dir
from rematbench.plan import Plan, Unsupported
from rematbench.problem import Problem
from tests.problems import GPT, problem

FILES = sorted(path for path in data_dir("methods").glob("*.py") if path.name[0] != "_")
REGISTRY = discover()


@cache
def problems() -> dict[str, Problem]:
    """One GPU, tensor parallel GPT without flash, a pipeline, an interleaved one, full sharding."""
    made = {
        "one": problem(),
        "tp": problem(model=GPT, attention="unfused", tp=2, dp=2, global_batch=4),
        "pp": problem(pp=4, global_batch=6),
        "vpp": problem(pp=2, vpp=2, tp=2, global_batch=4),
        "fsdp": problem(dp=4, zero_stage=3, global_batch=4, system="torchtitan"),
    }
    return {name: replace(p, evaluator=evaluate) for name, p in made.items()}


def method(path: Path) -> Any:
    return REGISTRY.methods[path.stem].cls()


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


def test_the_folder_has_methods_and_all_load() -> None:
    assert FILES
    assert not REGISTRY.broken


def test_the_file_is_named_after_its_method(path: Path) -> None:
    assert path.stem in REGISTRY.methods


def test_the_docstring_says_claim_source_and_deviations(path: Path) -> None:
    doc = REGISTRY.methods[path.stem].doc
    assert doc.startswith(f"{path.stem}: ")
    for word in ("Claim:", "Source:", "Deviations:"):
        assert f"\n{word}" in doc, f"{path.name} has no line {word}"


def test_the_file_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 150


def test_plan_takes_problem_and_base(path: Path) -> None:
    assert list(inspect.signature(method(path).plan).parameters) == ["problem", "base"]


def test_no_global_is_written(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    assert not [node for node in nodes if isinstance(node, ast.Global | ast.Nonlocal)]


def test_parameters_survive_json(path: Path) -> None:
    made = method(path)
    assert msgspec.json.decode(msgspec.json.encode(made), type=type(made)) == made


@pytest.mark.parametrize("name", ["one", "tp", "pp", "vpp", "fsdp"])
def test_the_plan_is_pure_lowers_and_is_safe(path: Path, name: str) -> None:
    p = problems()[name]
    made = method(path)
    plan = made.plan(p, p.base_plan)
    assert plan == made.plan(p, p.base_plan), "plan must be a pure function"
    if isinstance(plan, Unsupported):
        assert plan.reason
        return
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    program = lower(plan, p)
    check(program)
    for ledger in issue_order(program):
        assert (ledger.device_left_bytes, ledger.host_left_bytes) == (0, 0)


@pytest.mark.parametrize("name", ["pp", "vpp"])
@pytest.mark.parametrize("base", FILES, ids=lambda path: path.stem)
def test_methods_compose(path: Path, base: Path, name: str) -> None:
    """On top of any other method: a plan that lowers, or a reason."""
    p = problems()[name]
    under = method(base).plan(p, p.base_plan)
    if path == base or isinstance(under, Unsupported):
        return
    plan = method(path).plan(p, under)
    if not isinstance(plan, Unsupported):
        check(lower(plan, p))
