"""What a rule of the workflow depends on: the code behind its own command, and nothing else."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rematbench.cli import baseline
from rematbench.cli.app import PLACES
from rematbench.paper.catalog import table_files
from rematbench.paper.targets import targets
from rematbench.worlds.records import digests
from rematbench.worlds.records.digests import module_digest
from tests.tables import tables

ROOT = Path(__file__).resolve().parents[2]
METHODS = sorted((ROOT / "methods").glob("*.py"))
COMPUTED = {"bundle": {"suite": "smoke", "method": "keep_all"}, "predict": {"method": "keep_all"}}
"""Two targets that run methods, and what stands in their paths."""
CHANGED = {
    "costs/formulas.py": {"bundle", "predict"},
    "engine/lowering/passes/emit_recompute.py": {"bundle", "predict"},
    "solve/swap.py": set(),  # only other methods import it
    "paper/builders/records.py": {"bundle"},
    "paper/builders/predictions.py": {"predict"},
    "worlds/slurm/launch.py": set(),
    "paper/tables/scores.py": set(),
    "paper/targets.py": set(),
    "paper/html.py": set(),
    "cli/make.py": set(),
}


def forget() -> None:
    for cached in (digests.closure, digests._file, digests._imports):
        cached.cache_clear()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the package to add remarks to, which change no import."""
    copy = tmp_path_factory.mktemp("src") / "rematbench"
    bare = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src/rematbench", copy, ignore=bare)
    shutil.copytree(ROOT / "baselines", copy / "baselines", ignore=bare)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "PACKAGE", copy)
        patch.setattr(digests, "BASELINES", copy / "baselines")
        forget()
        yield copy
    forget()


def due(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def edit(path: Path) -> None:
    with path.open("a") as opened:
        opened.write("# edited\n")


def test_an_edit_makes_the_targets_due_that_it_touches(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    known = {target.name: target for target in targets()}

    def told() -> dict[str, str]:
        return {name: known[name].digest(values) for name, values in COMPUTED.items()}

    for name, wanted in CHANGED.items():
        before = told()
        edit(package / name)
        assert due(before, told()) == wanted, name


@pytest.mark.parametrize(("module", "file"), tables(__file__)["made_again"])
def test_results_are_made_again_when_the_code_behind_them_changes(
    package: Path, module: str, file: str
) -> None:
    before = module_digest(f"rematbench.{module}")
    edit(package / file)
    assert module_digest(f"rematbench.{module}") != before


@pytest.mark.parametrize("name", table_files())
def test_a_change_of_one_tables_file_makes_that_table_due_alone(package: Path, name: str) -> None:
    def told() -> dict[str, str]:
        return {one.name: module_digest(one.module) for one in table_files().values()}

    before = told()
    edit(package / f"paper/tables/{name}.py")
    assert due(before, told()) == {name}


def test_what_a_method_imports_is_part_of_its_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    (bundle,) = (target for target in targets() if target.name == "bundle")
    plain, lynx = ({"suite": "smoke", "method": name} for name in ("keep_all", "lynx_opt"))
    assert bundle.digest(plain) != bundle.digest(lynx)
    assert bundle.files(lynx)["reads"] == ["methods/lynx_opt.py"]


@pytest.mark.parametrize("world", ["simulated", "traced", "executed"])
def test_every_records_digest_covers_lowering_and_costs(world: str) -> None:
    roots = digests.executed_roots() if world == "executed" else digests.SIMULATED
    names = {str(path.relative_to(digests.PACKAGE)) for path in digests.closure(roots)}
    wanted = {"engine/lowering/lower.py", "costs/formulas.py", "costs/operators/block.py"}
    assert wanted <= names
    assert ("worlds/torch/executor.py" in names) == (world == "executed")


def test_a_methods_digest_covers_its_file_and_its_solver(tmp_path: Path) -> None:
    copy = tmp_path / "memo.py"
    shutil.copy(ROOT / "methods/memo.py", copy)
    before = digests.method_digest([str(copy)])
    with copy.open("a") as file:
        file.write("# edited\n")
    assert digests.method_digest([str(copy)]) != before


def test_no_module_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no module 'rematbench\.cli\.nothing'"):
        module_digest("rematbench.cli.nothing")


def modules() -> dict[str, str]:
    """The module of every command, by the words that a person types."""
    group = {
        f"baseline {info.name or info.callback.__name__.replace('_', '-')}": "baseline"
        for info in baseline.app.registered_commands
        if info.callback is not None
    }
    return {name: place.partition(".")[0] for name, place in PLACES.items()} | group


UNHASHED = {"executed": "its cells' keys", "validate": "no output: it always runs"}


def test_every_rule_depends_on_the_code_of_its_own_command() -> None:
    known = modules()
    checked = set()
    for path in (ROOT / "workflows").glob("*.smk"):
        for rule in re.split(r"^rule ", path.read_text(), flags=re.MULTILINE)[1:]:
            name = rule.partition(":")[0]
            called = re.search(r"rematbench ((?:baseline )?[\w-]+)", rule.partition("shell:")[2])
            if called is None or name in UNHASHED or called[1] == "make":
                continue
            found = re.findall(r"engine=.*code\(\s*\"([\w.]+)\"", rule)
            assert found == [known[called[1]]], f"{path.name}: rule {name}"
            checked.add(name)
    assert {"retrace", "executed_table"} <= checked
