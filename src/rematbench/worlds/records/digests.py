"""Digests of the code that can change a result: modules found through imports, hashed together.

A cell stays finished while the code behind it is unchanged. A digest must cover every file that the
cell may load. It should cover no other file, so that a change of a table does not cost GPU-hours.
"""

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rematbench.inputs.paths import data_dir

PACKAGE = Path(__file__).resolve().parents[2]
BASELINES = data_dir("baselines")
SIMULATED = ("rematbench.evaluate.result", "rematbench.worlds.records.record")

LOADS_BY_NAME = "rematbench.worlds.packages.process"
"""The module that loads plan.py and stack.py of baselines by path, without an import statement."""


def executed_roots() -> tuple[str, ...]:
    """The root modules of an executed record: the torch runtime, and SIMULATED."""
    folder = PACKAGE / "worlds/torch"
    names = [f"rematbench.worlds.torch.{path.stem}" for path in folder.glob("*.py")]
    return (*sorted(names), *SIMULATED)


@cache
def closure(roots: tuple[str, ...]) -> tuple[Path, ...]:
    """The files of rematbench that importing `roots` may load, sorted."""
    found: set[Path] = set()
    waiting, seen = list(roots), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _file(name)
        if path is None:
            continue
        found.add(path)
        waiting += _imports(path)
        if name == LOADS_BY_NAME:
            files = [*BASELINES.glob("*/plan.py"), *BASELINES.glob("*/stack.py")]
            waiting += [f"baselines.{file.parent.name}.{file.stem}" for file in files]
    return tuple(sorted(found))


@cache
def _file(name: str) -> Path | None:
    """The file of a module of rematbench or of baselines; None for any other module."""
    parts = name.split(".")
    roots = {PACKAGE.name: PACKAGE, "baselines": BASELINES}
    if parts[0] not in roots:
        return None
    base = roots[parts[0]].joinpath(*parts[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """The names that a file imports, also inside functions; cached, because files do not change
    while a process runs."""
    found: list[str] = []
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif not isinstance(node, ast.expr):  # an expression cannot import
            waiting += ast.iter_child_nodes(node)
    return tuple(found)


def module_digest(module: str, methods: Iterable[Path] = ()) -> str:
    """The digest of a module's code and of the modules that the files of `methods` import. The
    method files themselves are left out, because the caller has them among its inputs. ValueError
    for an unknown module."""
    if _file(module) is None:
        raise ValueError(f"no module {module!r}")
    roots = {module, *(name for path in methods for name in _imports(path))}
    return digest(closure(tuple(sorted(roots))))


def digest(paths: Iterable[Path]) -> str:
    joined = hashlib.sha256()
    for path in sorted(set(paths)):
        joined.update(f"{path.name}\n".encode() + path.read_bytes())
    return joined.hexdigest()[:16]


def method_digest(origins: Iterable[str]) -> str:
    """The digest of methods' files and of the modules that they import."""
    files = set(map(Path, origins))
    imported = {name for path in files for name in _imports(path)}
    return digest(files | set(closure(tuple(sorted(imported)))))


# Why: docs/decisions/worlds.md, Does an executed cell's key hash all of src?
@cache
def code_digest(world: str) -> str:
    """The digest of the code that makes the records of a world."""
    return digest(closure(executed_roots() if world == "executed" else SIMULATED))
