"""The rooms of the house: what may import what, read from the syntax of every file."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

ROOMS: dict[str, tuple[str, ...]] = {
    "host": (),
    "model": (),
    "workload": (),
    "inputs": (),
    "spec": (),
    "costs": ("operators", "."),
    "plan": (),
    "problem": (),
    "method": (),
    "engine": ("program", "lowering", "simulate"),
    "solve": (),
    "foreign": (),
    "plugins": (),
    "evaluate": (),
    "worlds": ("records", "packages", "torch", ".", "slurm"),
    "evidence": ("published", "kernels", "."),
    "advise": ("candidates", "bounds", "search", "compare"),
    "measure": (".", "torch", "parts"),
    "paper": ("sheet", "matrix", "studies", "tables", ".", "builders"),
    "api": (),
    "cli": (),
}
"""The rooms of src/rematbench in their order, each with its inner rooms in theirs (`.`: the files
that stand in the room itself).  A room imports only itself and rooms before it, at both levels."""
FOLDERS = {"engine.lowering": ("blocks", "states", "passes", ".")}
"""The folders of an inner room, in their order, by the same rule."""
FLOORS = {"engine.lowering": 6, "advise": 4}
"""The longest chain of imports inside a room, in modules."""
ALIASES = {"__init__": "api", "__main__": "cli"}

READERS = {
    "engine.simulate.op_level",
    "engine.simulate.max_plus",
    "engine.program.ledger",
    "engine.program.profile",
    "evaluate.proof",
    "evaluate.state_order",
}
"""Readers of actions."""
TORCH = {"worlds.torch", "measure.torch"}

METHOD_MAY_IMPORT = {"method", "model", "plan", "problem", "solve", "workload", "inputs", "spec"}
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


def members(names: set[str]) -> set[str]:
    full = {f"rematbench.{name}" for name in names}
    return {module for module in MODULES if full & with_parents(module)}


def top(names: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(module: str) -> tuple[str, str]:
    """The room and the inner room of a module."""
    parts = module.split(".")[1:] or ["__init__"]
    first = ALIASES.get(parts[0], parts[0])
    return first, parts[1] if len(parts) > 2 else "."


def place(module: str) -> tuple[int, int, int]:
    """The places of a module's room, inner room and folder in their orders."""
    first, inner = room(module)
    folders = FOLDERS.get(f"{first}.{inner}", ())
    parts = module.split(".")[3:-1]
    deep = folders.index(parts[0] if parts else ".") if folders else 0
    return list(ROOMS).index(first), (ROOMS[first] or (".",)).index(inner), deep


def is_package(module: str) -> bool:
    """Whether the module is a folder's `__init__`, which holds no code."""
    return MODULES[module].stem == "__init__" and module != "rematbench"


def test_a_room_imports_only_rooms_before_it() -> None:
    """Imports inside functions count: what they hide is a circle all the same."""
    wrong = []
    for module in sorted(MODULES):
        if is_package(module):
            continue
        here = place(module)
        for target in sorted(imports(MODULES[module]) & MODULES.keys()):
            if not is_package(target) and target != "rematbench" and place(target) > here:
                wrong.append(f"{module} -> {target}")
    assert not wrong


@pytest.mark.parametrize("name", FLOORS)
def test_chains_of_imports_inside_a_room_are_short(name: str) -> None:
    inside = {module for module in members({name}) if not is_package(module)}

    @cache
    def floor(module: str) -> int:
        return 1 + max(map(floor, imports(MODULES[module]) & inside), default=0)

    assert max(map(floor, inside)) == FLOORS[name]


def test_folders_hold_no_code_of_their_own() -> None:
    """What a folder's `__init__` held would be imported with every module of the folder."""
    for module, path in MODULES.items():
        if is_package(module):
            assert all(isinstance(node, ast.Expr) for node in ast.parse(path.read_text()).body)


def test_files_do_not_import_each_other_in_circles() -> None:
    circle: list[str] = []
    try:
        TopologicalSorter(
            {m: imports(path) & MODULES.keys() for m, path in MODULES.items()}
        ).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle


def test_readers_of_actions_know_no_plan() -> None:
    readers = members(READERS)
    vocabulary = members({"plan", "problem", "engine.lowering"})
    assert not {module for module in readers if reachable(module) & vocabulary}


def test_the_list_of_rooms_is_the_one_of_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    page = text.partition("## Rooms")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z_]+)(?:\.py|/)`", page, re.MULTILINE)
    assert rows == list(ROOMS)
    for room, inner in ROOMS.items():
        line = next(row for row in page.splitlines() if row.startswith(f"| `{room}"))
        named = re.findall(r"`([a-z_]+)/`", line.partition("|")[2].partition("|")[2])
        rows = [(name, *FOLDERS.get(f"{room}.{name}", ())) for name in inner]
        assert named == [name for row in rows for name in row if name != "."], room


def test_costs_do_not_know_the_problem() -> None:
    crossed = {
        m for m in members({"costs"}) if reachable(m) & members({"problem", "engine.lowering"})
    }
    assert not crossed


@pytest.mark.parametrize("path", python_files("methods"), ids=label)
def test_methods_import_only_the_vocabulary(path: Path) -> None:
    names = imports(path)
    assert top(names) <= METHOD_LIBRARIES
    ours = {name.split(".")[1] for name in names if name.startswith("rematbench.")}
    assert ours <= METHOD_MAY_IMPORT
    assert "rematbench" not in names or ours, f"{label(path)}: import a module of rematbench"


def test_a_shipped_method_needs_two_modules() -> None:
    """`method`, and one room of solvers: what a person has to know in order to write another."""
    needed = [len(imports(path) & MODULES.keys()) for path in python_files("methods")]
    assert median(needed) <= 2
    assert max(needed) <= 4


def test_src_imports_no_method_baseline_or_figure() -> None:
    assert not [label(path) for path in python_files("src") if top(imports(path)) & OUTSIDE]


def test_frameworks_stay_in_their_places() -> None:
    allowed = {MODULES[module] for module in members(TORCH)}
    searched = {*python_files("src", "methods", "figures", "workflows")} - allowed
    assert not [label(path) for path in searched if top(imports(path)) & FRAMEWORKS]


def test_loading_every_module_loads_no_framework() -> None:
    modules = sorted(MODULES.keys() - members(TORCH))
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


def test_a_file_has_at_most_500_lines() -> None:
    paths = python_files("src", "methods", "baselines", "benchmarks", "figures", "tests")
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {path: count for path, count in lines.items() if count > 500} == {}
