"""Which code can change a result: modules reached by imports, and one hash of their text.

A cell stays finished while the code behind it is the same.  So a digest covers every file that the
cell may load, and should cover no other: a better table must not cost GPU-hours.
"""

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
COMMANDS = "rematbench.cli"
SIMULATED = ("rematbench.choose.outcome", "rematbench.runs.record")
"""Modules that make a simulated record."""


def executed_roots() -> tuple[str, ...]:
    """Modules that make an executed record: the torch runtime, and SIMULATED."""
    names = [f"rematbench.torch.{path.stem}" for path in (PACKAGE / "torch").glob("*.py")]
    return (*sorted(names), *SIMULATED)


@cache
def closure(roots: tuple[str, ...]) -> tuple[Path, ...]:
    """The files of this package that importing `roots` may load, sorted."""
    found: set[Path] = set()
    waiting = list(roots)
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        path = _file(name)
        if name in seen or path is None:
            continue
        seen.add(name)
        found.add(path)
        waiting += _own_imports(path)
    return tuple(sorted(found))


@cache
def _own_imports(path: Path) -> tuple[str, ...]:
    """Imports of a file of this package, read once: closures share most files."""
    return tuple(_imports(path))


def _file(name: str) -> Path | None:
    parts = name.split(".")
    if parts[0] != PACKAGE.name:
        return None
    base = PACKAGE.joinpath(*parts[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _imports(path: Path) -> tuple[str, ...]:
    return tuple(_imported(_syntax(path)))


@cache
def _syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imported(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _of_command(module: str, name: str) -> tuple[set[Path], set[str]]:
    """Files and imports behind one name of a module of commands: those of the names that it uses,
    directly or not, but not those of its neighbours, which are other commands."""
    files: set[Path] = set()
    roots: set[str] = set()
    waiting, seen = [(module, name)], set()
    while waiting:
        module, name = at = waiting.pop()
        path = _file(module)
        if at in seen or path is None:
            continue
        seen.add(at)
        files.add(path)
        for node in _bindings(path).get(name, ()):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{COMMANDS}."):
                waiting.append((str(node.module), node.names[0].name))
            else:
                roots.update(_imported(node))
                used = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
                waiting += [(module, word) for word in used]
    return files, roots


@cache
def _bindings(path: Path) -> dict[str, list[ast.stmt]]:
    """The statements that bind each name of a module; imports at any depth, one name each."""
    tree = _syntax(path)
    found: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.setdefault(name, []).append(node)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                for leaf in ast.walk(node):
                    if isinstance(leaf, ast.Name) and isinstance(leaf.ctx, ast.Store):
                        found.setdefault(leaf.id, []).append(node)
    for inner in ast.walk(tree):
        if isinstance(inner, ast.ImportFrom | ast.Import):
            for alias in inner.names:
                one = (
                    ast.ImportFrom(inner.module, [alias], 0)
                    if isinstance(inner, ast.ImportFrom)
                    else ast.Import([alias])
                )
                found.setdefault((alias.asname or alias.name).split(".")[0], []).append(one)
    return found


def command_digest(command: str, methods: Iterable[Path] = ()) -> str:
    """The code behind a command (`module.function` of the package of commands), and the modules
    that the files of `methods` import; these files themselves are inputs of the rule."""
    module, _, function = command.rpartition(".")
    files, roots = _of_command(f"{COMMANDS}.{module}", function)
    if not roots:
        raise ValueError(f"no command {command!r}")
    for path in methods:
        roots.update(_imports(path))
    return digest(files.union(closure(tuple(sorted(roots)))))


def digest(paths: Iterable[Path]) -> str:
    """One short word for the names and contents of files."""
    joined = hashlib.sha256()
    for path in sorted(set(paths)):
        joined.update(f"{path.name}\n".encode() + path.read_bytes())
    return joined.hexdigest()[:16]


def method_digest(origins: Iterable[str]) -> str:
    """Digest of a composed method's files and imports (an installed method: its name)."""
    found: set[Path] = set()
    names = []
    for origin in origins:
        path = Path(origin)
        if path.is_file():
            found |= {path, *closure(tuple(sorted(_imports(path))))}
        else:
            names.append(origin)
    return digest(found) + "".join(sorted(names))


@cache
def code_digest(world: str) -> str:
    """The code behind the records of a world."""
    return digest(closure(executed_roots() if world == "executed" else SIMULATED))
