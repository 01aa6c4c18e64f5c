"""The contract of a method's file: the shipped ones keep it, and what breaks it is told."""

from pathlib import Path
from typing import Any

import pytest

from rematbench.evaluate.method_contract import check_file, check_on_top, check_plan, problems
from rematbench.inputs.paths import data_dir
from rematbench.plugins.discover import discover
from rematbench.plugins.file_checks import CONTRACT_CHECKS, FORMAT_CHECKS, MethodFile, first_problem
from rematbench.plugins.registry import MethodError
from tests.method_files import method_file
from tests.problems import all_methods
from tests.typed import typed

FILES = sorted(path for path in data_dir("methods").glob("*.py") if path.name[0] != "_")
REGISTRY = all_methods()


def method(path: Path) -> Any:
    return REGISTRY.methods[path.stem].cls()


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


def test_the_folder_has_methods_and_all_load() -> None:
    assert FILES
    assert not REGISTRY.broken


def test_the_file_keeps_the_contract(path: Path) -> None:
    entry = REGISTRY.methods[path.stem]
    file = MethodFile(path=path, name=entry.name, cls=entry.cls, doc=entry.doc)
    assert first_problem(file, FORMAT_CHECKS | CONTRACT_CHECKS) == ""


@pytest.mark.parametrize("name", problems())
def test_the_plan_is_pure_lowers_and_is_safe(path: Path, name: str) -> None:
    check_plan(method(path), problems()[name])


@pytest.mark.parametrize("name", ["pp", pytest.param("vpp", marks=pytest.mark.full)])
@pytest.mark.parametrize("base", FILES, ids=lambda path: path.stem)
def test_methods_compose(path: Path, base: Path, name: str) -> None:
    """On top of any other method: a plan that lowers, or a reason."""
    if path != base:
        check_on_top(method(path), method(base), problems()[name])


RETURN = 'return base.with_rules(Rule(Select(parts=("layer",), activations=("q",)), Offload()))'
SMALL = method_file(
    "small", RETURN, head="import random\n\nCALLS = 0\n", fields="share: float = 1.0"
)
BROKEN: list[tuple[str, str, str, bool]] = [
    (RETURN, "return 1 / 0", "ZeroDivisionError", False),
    (RETURN, "return 3", "plan returned a int, not a Plan", False),
    (RETURN, 'return Unsupported("")', "plan returned Unsupported without a reason", False),
    (RETURN, "return base.noting(x=random.random())", "two calls return different", False),
    ('("q",)', '("no_such",)', "rule matches no saved tensor", False),
    ('("q",)), Offload()', '("layer_input",)), Recompute()', "no operator computes it", False),
    ("(self, problem: Problem, base: Plan)", "(self, base: Plan, problem: Problem)",
     "plan takes (base, problem)", True),
    (RETURN, "global CALLS\n        CALLS += 1\n        return base",
     "line 27 writes a variable of another scope", True),
    ("Source: a test.\n", "", "the docstring lacks the line Source:", False),
    ('"""small: a test', '"""A test', "the docstring must start with 'small: '", False),
    ('name: ClassVar[str] = "small"', 'name: ClassVar[str] = "other"', "small.py defines 'other'",
     False),
    ("CALLS = 0\n", "CALLS = 0\n" * 150, "lines)", False),
    ("frozen=True, ", "", "must be frozen", True),
    ("import random", "import no_such_module", "ModuleNotFoundError", True),
]  # fmt: skip


def written(folder: Path, text: str) -> Path:
    path = folder / "small.py"
    path.write_text(text)
    return path


def test_a_file_that_keeps_it_passes_every_check(tmp_path: Path) -> None:
    passed = list(check_file(written(tmp_path, SMALL), REGISTRY))
    for words in (
        "parameters are unchanged after encoding to JSON and back",
        "the plan on 'vpp' is pure",
        "composes with memo,",
    ):
        assert any(words in line for line in passed), words
    assert "small" in discover([tmp_path]).methods


@pytest.mark.parametrize(
    ("old", "new", "told", "cheap"), BROKEN, ids=[told for _, _, told, _ in BROKEN]
)
def test_a_file_that_breaks_it_is_told_in_one_line(
    tmp_path: Path, old: str, new: str, told: str, cheap: bool
) -> None:
    """What can be had without a plan, and changes results, makes one of --methods unavailable."""
    assert old in SMALL
    path = written(tmp_path, SMALL.replace(old, new, 1))
    with pytest.raises(MethodError) as caught:
        list(check_file(path, REGISTRY))
    assert told in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert (told in discover([tmp_path]).broken.get(str(path), "")) is cheap


def test_the_command_ends_with_1_where_a_file_is_broken(tmp_path: Path) -> None:
    good = typed("methods", "--check", str(written(tmp_path, SMALL)))
    assert (good.code, good.err) == (0, "")
    assert all(line.startswith("ok: ") for line in good.out.splitlines())
    bad = typed("methods", "--check", str(written(tmp_path, SMALL.replace("q", "no_q"))))
    assert bad.code == 1
    assert bad.err.count("\n") == 1
    assert typed("methods", "--check", str(tmp_path / "none.py")).code == 2
