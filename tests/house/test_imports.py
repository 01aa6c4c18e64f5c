"""The arrows of DESIGN.md, read from the syntax of every file: what may import what."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

# plan <- lower <- {readers of actions, torch} <- one method's outcome <- cli: none reaches, through
# any number of imports, a later layer or another group of its own layer.  A name stands for its
# submodules too.
READERS = {
    "simulate.step",
    "simulate.max_plus",
    "program.check",
    "program.ledger",
    "program.profile",
}
LAYERS: list[list[set[str]]] = [
    [{"plan"}],
    [{"lowering.lower"}],
    [READERS, {"torch"}],
    [{"choose.outcome"}],
    [{"cli"}],
]

METHOD_MAY_IMPORT = {"plan", "problem", "solve", "workload", "spec"}
METHOD_LIBRARIES = {"rematbench", "msgspec", "numpy"} | sys.stdlib_module_names
OUTSIDE = {"methods", "baselines", "figures"}
FRAMEWORKS = {"torch", "megatron", "deepspeed"}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in python_files("src")}


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> frozenset[str]:
    """Every dotted name a file imports, at any depth; `from a import b` counts as a and a.b."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {f"{node.module}"}
    return frozenset(found)


def with_parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}


@cache
def reachable(module: str) -> frozenset[str]:
    """The rematbench modules that importing `module` may load."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        needed = {part for target in imports(MODULES[name]) for part in with_parents(target)}
        waiting.extend((needed | with_parents(name)) & MODULES.keys())
    return frozenset(found)


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions count: what they hide is a circle all the same."""
    circle: list[str] = []
    try:
        TopologicalSorter(
            {m: imports(path) & MODULES.keys() for m, path in MODULES.items()}
        ).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle


def members(names: set[str]) -> set[str]:
    full = {f"rematbench.{name}" for name in names}
    return {module for module in MODULES if full & with_parents(module)}


def top(names: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_name_of_the_layers_is_a_module() -> None:
    """All but torch, the executor, which comes with its own extra."""
    names = {name for row in LAYERS for group in row for name in group}
    assert {name for name in names if not members({name})} <= {"torch"}


@pytest.mark.parametrize("level", range(len(LAYERS)))
def test_arrows_point_down(level: int) -> None:
    later = [group for row in LAYERS[level + 1 :] for group in row]
    for group in LAYERS[level]:
        beside = [other for other in LAYERS[level] if other is not group]
        forbidden = members(set().union(*later, *beside))
        crossed = {module: reachable(module) & forbidden for module in members(group)}
        assert not {module: sorted(found) for module, found in crossed.items() if found}


def test_readers_of_actions_know_no_plan() -> None:
    readers = members(READERS)
    vocabulary = members({"plan", "problem", "lowering"})
    assert not {module for module in readers if reachable(module) & vocabulary}


COMMANDS = {"__main__", "cli"}
PURPOSES = {"matrix", "packages", "published", "slurm", "studies", "tables", "worlds"}


def test_only_the_command_line_knows_commands() -> None:
    allowed = members(COMMANDS)
    crossed = {m for m in MODULES.keys() - allowed if reachable(m) & allowed}
    assert not crossed


def test_what_makes_a_plan_and_its_reading_serves_no_single_purpose() -> None:
    """The layers below `choose/` are used by studies, tables and pages, and know none of them."""
    core = {"operators", "lowering", "cost", "solve", "simulate"}
    core |= {name for row in LAYERS[:3] for group in row for name in group}
    purposes = members(PURPOSES)
    assert all(members({name}) for name in core | PURPOSES)
    assert not {
        m: sorted(reachable(m) & purposes) for m in members(core) if reachable(m) & purposes
    }


def test_every_place_is_on_the_map() -> None:
    """CONTRIBUTING.md says where each idea goes: every module and package of the first level."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    mapped = text.partition("## Where things are")[2].partition("\n## ")[0]
    package = SRC / "rematbench"
    places = {f"`{path.stem}`" for path in package.glob("*.py") if path.stem != "__init__"}
    places |= {f"`{path.parent.name}/`" for path in package.glob("*/__init__.py")}
    assert not {place for place in places if place not in mapped}
    modules = {f"`{path.stem}`" for path in package.rglob("*.py")}
    assert not set(re.findall(r"`[a-z_]+/?`", mapped)) - places - modules


def test_costs_do_not_know_the_problem() -> None:
    crossed = {m for m in members({"cost"}) if reachable(m) & members({"problem", "lowering"})}
    assert not crossed


@pytest.mark.parametrize("path", python_files("methods"), ids=label)
def test_methods_import_only_the_vocabulary(path: Path) -> None:
    names = imports(path)
    assert top(names) <= METHOD_LIBRARIES
    ours = {name.split(".")[1] for name in names if name.startswith("rematbench.")}
    assert ours <= METHOD_MAY_IMPORT
    assert "rematbench" not in names or ours, f"{label(path)}: import a module of rematbench"


def test_src_imports_no_method_baseline_or_figure() -> None:
    assert not [label(path) for path in python_files("src") if top(imports(path)) & OUTSIDE]


def test_frameworks_stay_in_their_places() -> None:
    searched = python_files("src", "methods", "figures", "workflows", "tests/unit")
    torch_places = SRC / "rematbench" / "torch"
    crossed = [
        label(path)
        for path in searched
        if not path.is_relative_to(torch_places) and top(imports(path)) & FRAMEWORKS
    ]
    assert not crossed


def test_loading_every_module_loads_no_framework() -> None:
    modules = sorted(MODULES.keys() - members({"torch"}))
    code = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module(name)
print(sorted({FRAMEWORKS} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def reads_environment(node: ast.AST) -> bool:
    words = {"environ", "environb", "getenv", "getenvb"}
    if isinstance(node, ast.Attribute):
        return node.attr in words and isinstance(node.value, ast.Name) and node.value.id == "os"
    return (
        isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and bool(words & {alias.name for alias in node.names})
    )


def places(wrong: Callable[[ast.AST], bool]) -> list[str]:
    """File and line of every such node of the library and the methods."""
    return [
        f"{label(path)}:{node.lineno}"  # type: ignore[attr-defined]
        for path in python_files("src", "methods")
        for node in nodes(path)
        if wrong(node)
    ]


def test_library_code_does_not_read_the_environment() -> None:
    assert places(reads_environment) == []


def adds_seconds(node: ast.AST) -> bool:
    """Whether it is a built-in sum over something named as seconds or hours."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    names |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    return node.func.id == "sum" and any(
        name.endswith(("_s", "seconds", "_hours")) for name in names
    )


def test_times_are_added_alike_on_every_python() -> None:
    """sum() of floats rounds differently since Python 3.12; math.fsum is exact on all of them."""
    assert places(adds_seconds) == []
