"""Checks of a method file that need no plan: its name, its text, its parameters."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

LONGEST_FILE = 150
"""The maximum number of lines of a method file; long solvers belong in rematbench.solve."""
SECTIONS = ("Claim:", "Source:", "Deviations:")


class MethodFile(Struct, frozen=True, kw_only=True):
    """A loaded method file: its path, and the name, class and docstring of its method."""

    path: Path
    name: str
    cls: type[Any]
    doc: str


def _named(file: MethodFile) -> str:
    return "" if file.path.stem == file.name else f"{file.path.name} defines {file.name!r}"


def _documented(file: MethodFile) -> str:
    if not file.doc.lstrip().startswith(f"{file.name}: "):
        return f"the docstring must start with {file.name + ': '!r}"
    missing = [word for word in SECTIONS if f"\n{word}" not in file.doc]
    return f"the docstring lacks the line {', '.join(missing)}" if missing else ""


def _short(file: MethodFile) -> str:
    lines = len(file.path.read_text(encoding="utf-8").splitlines())
    return f"{lines} lines" if lines > LONGEST_FILE else ""


def _signature(file: MethodFile) -> str:
    found = list(inspect.signature(file.cls().plan).parameters)
    return "" if found == ["problem", "base"] else f"plan takes ({', '.join(found)})"


def _stateless(file: MethodFile) -> str:
    tree = ast.parse(file.path.read_text(encoding="utf-8"))
    found = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Global | ast.Nonlocal)]
    return f"line {found[0]} writes a variable of another scope" if found else ""


def _as_json(file: MethodFile) -> str:
    method = file.cls()
    decoded = msgspec.json.decode(msgspec.json.encode(method), type=file.cls)
    return "" if decoded == method else f"decoding gives {decoded}"


Checks = dict[str, Callable[[MethodFile], str]]
FORMAT_CHECKS: Checks = {
    "the file name is the method's name": _named,
    f"the docstring names it and has {', '.join(SECTIONS)}": _documented,
    f"the file has at most {LONGEST_FILE} lines": _short,
}
CONTRACT_CHECKS: Checks = {
    "plan takes (problem, base)": _signature,
    "no variable of another scope is written": _stateless,
    "parameters are unchanged after encoding to JSON and back": _as_json,
}


def first_problem(file: MethodFile, checks: Checks) -> str:
    """The first check that fails, with the reason, in one line; empty if all pass."""
    for check, broken in checks.items():
        if problem := broken(file):
            return f"failed check: {check} ({problem})"
    return ""
