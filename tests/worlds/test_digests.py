"""What a rule of the workflow depends on: the code behind its own command, and nothing else."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rematbench.cli import baseline
from rematbench.cli.app import PLACES
from rematbench.paper.catalog import table_files
from rematbench.worlds.records import digests
from rematbench.worlds.records.digests import command_digest

ROOT = Path(__file__).resolve().parents[2]
METHODS = sorted((ROOT / "methods").glob("*.py"))
PREDICTIONS = ("sheet", "run")
CHANGED = {
    "costs/formulas.py": True,
    "engine/lowering/emit_rebuild.py": True,
    "solve/swap.py": True,  # only methods import it
    "cli/run.py": None,  # one of the two commands
    "worlds/slurm/launch.py": False,
    "paper/tables/scores.py": False,
    "paper/tables/matrix.py": False,
    "paper/html.py": False,
    "cli/app.py": False,
}


def forget() -> None:
    for cached in (digests.closure, digests._imports):
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


def test_only_what_can_change_a_prediction_changes_its_digest(package: Path) -> None:
    def told() -> list[str]:
        return [command_digest(command, METHODS) for command in PREDICTIONS]

    for name, all_change in CHANGED.items():
        before = told()
        with (package / name).open("a") as file:
            file.write("# edited\n")
        changed = [one != other for one, other in zip(before, told(), strict=True)]
        assert changed == ([False, True] if all_change is None else [all_change] * 2), name


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("table", "evidence/published/sheets.py"),
        ("report", "paper/html.py"),
        ("cells", "worlds/slurm/campaign_rows.py"),
        ("verify", "worlds/torch/arithmetic.py"),  # imported inside a function
        ("verify", "worlds/packages/process.py"),
        ("verify", "baselines/megatron_core/stack.py"),  # loaded by name
        ("study", "paper/studies/answers.py"),
    ],
)
def test_results_are_made_again_when_the_code_of_their_command_changes(
    package: Path, command: str, file: str
) -> None:
    before = command_digest(command)
    with (package / file).open("a") as opened:
        opened.write("# edited\n")
    assert command_digest(command) != before


@pytest.mark.parametrize("name", table_files())
def test_a_change_of_one_tables_file_makes_that_table_due_alone(package: Path, name: str) -> None:
    def told() -> dict[str, str]:
        forget()
        modules = {one.name: one.module for one in table_files().values()}
        return {key: command_digest("table", loaded=[module]) for key, module in modules.items()}

    before = told()
    with (package / f"paper/tables/{name}.py").open("a") as opened:
        opened.write("# edited\n")
    assert {key for key, text in told().items() if text != before[key]} == {name}


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


def test_no_command_is_an_error() -> None:
    with pytest.raises(ValueError, match="no module of commands 'nothing'"):
        command_digest("nothing")


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
            if called is None or name in UNHASHED:
                continue
            found = re.findall(r"engine=.*code\(\s*\"([\w.]+)\"", rule)
            assert found == [known[called[1]]], f"{path.name}: rule {name}"
            checked.add(name)
    assert {"predict", "bundle", "study", "matrix", "page"} <= checked
