"""Every place that orders streams, and the same program without one of them.

Two kinds.  The *runtime's*: calls in rematbench.worlds.torch that wait, record, start or end a
step, put work on a stream, or take memory from a pool; one is left out by writing its function anew
from its source.  The *program's*: waits that the lowering writes, one for each place in its source;
one is left out by making an event of it (what else it does stays).
"""

import ast
import inspect
import sys
import textwrap
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

import rematbench
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.program.action import Action, Kind
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.streams import Mark
from tests.worlds.torch.test_faults import edited

SOURCE = Path(rematbench.__file__).parent
TORCH = ("worlds", "measure")
"""Rooms with a folder torch."""
CONTEXTS = frozenset({"on", "storage_pool", "_output_pool"})
CALLS = frozenset({
    "wait", "wait_event", "wait_stream", "record", "record_stream", "synchronize", "mark", "share",
    "begin", "flush", "attach", "barrier", "finish", "result",
})  # fmt: skip
"""Names of what orders (or, `storage_pool`, lets memory be used again at once)."""


class Edge(NamedTuple):
    """A call: its file, its function (from the outside in), its words, which of those it is."""

    module: str
    function: str
    words: str
    number: int

    def __str__(self) -> str:
        again = f" ({self.number})" if self.number else ""
        return f"{self.module}.{self.function}: {self.words}{again}"


class _Calls(ast.NodeVisitor):
    """Calls of some methods with the outermost function that they stand in."""

    def __init__(self, module: str, names: frozenset[str]) -> None:
        self.module, self.names = module, names
        self.path: list[str] = []
        self.found: dict[Edge, ast.Call] = {}

    def _enter(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self.path.append(node.name)
        self.generic_visit(node)
        self.path.pop()

    visit_ClassDef = visit_FunctionDef = _enter

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in self.names:
            words = ast.unparse(node.func)
            edge = Edge(self.module, ".".join(self.path), words, 0)
            while edge in self.found:
                edge = edge._replace(number=edge.number + 1)
            self.found[edge] = node
        self.generic_visit(node)


def _calls(path: Path, names: frozenset[str]) -> dict[Edge, ast.Call]:
    visitor = _Calls(path.stem, names)
    visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
    return visitor.found


# -- the runtime's --------------------------------------------------------------------------------


@cache
def of_runtime() -> tuple[Edge, ...]:
    """Of the rooms with torch."""
    files = sorted(path for room in TORCH for path in (SOURCE / room / "torch").glob("*.py"))
    found = [_calls(path, CALLS | CONTEXTS) for path in files]
    every = (edge for calls in found for edge in calls)
    return tuple(edge for edge in every if "tracker" not in edge.words)  # it counts bytes


class _Leave(ast.NodeTransformer):
    """Put nothing in the place of one call; what it is called on is still worked out."""

    def __init__(self, edge: Edge) -> None:
        self.edge, self.seen, self.done = edge, 0, False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute) or ast.unparse(node.func) != self.edge.words:
            return node
        self.seen += 1
        if self.seen != self.edge.number + 1:
            return node
        self.done = True
        name = node.func.attr
        stand_in = "_nothing()" if name in CONTEXTS else "_no_mark" if name == "mark" else "None"
        made = ast.parse(f"(None, {stand_in})[1]", mode="eval").body
        assert isinstance(made, ast.Subscript)
        assert isinstance(made.value, ast.Tuple)
        made.value.elts[0] = node.func.value
        return made


def leave_out(edge: Edge, patch: pytest.MonkeyPatch) -> None:
    """The runtime without one of its edges."""
    names = (f"rematbench.{room}.torch.{edge.module}" for room in TORCH)
    module: ModuleType = next(sys.modules[name] for name in names if name in sys.modules)
    owner: Any = module
    *classes, name = (
        edge.function.split(".")[:2]
        if edge.function[0].isupper()
        else [edge.function.split(".")[0]]
    )
    for part in classes:
        owner = getattr(owner, part)
    source = textwrap.dedent(inspect.getsource(inspect.getattr_static(owner, name)))
    leave = _Leave(edge)
    tree = ast.fix_missing_locations(leave.visit(ast.parse(source)))
    assert leave.done, edge
    patch.setattr(module, "_nothing", nullcontext, raising=False)
    patch.setattr(module, "_no_mark", Mark(None), raising=False)
    made: dict[str, Any] = {}
    exec(compile(tree, str(edge), "exec"), vars(module), made)
    patch.setattr(owner, name, made[name])


# -- the program's --------------------------------------------------------------------------------

LOWERING = SOURCE / "engine/lowering"
WRITES_A_WAIT = frozenset({"collective", "state_copy"})
"""Methods of BlockWriter that write a wait of their own stream for whoever calls them."""


@cache
def _places() -> dict[tuple[str, str, int], Edge]:
    """(file, method, line) -> the wait, collective or copy that the lowering writes there."""
    found = {}
    for path in sorted(LOWERING.rglob("*.py")):
        for edge, node in _calls(path, WRITES_A_WAIT | {"wait"}).items():
            method = edge.words.rpartition(".")[2]
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                found[path.name, method, line] = edge
    return found


@cache
def of_programs() -> tuple[Edge, ...]:
    """Waits written anywhere, and calls of what writes one, in whose place those calls stand."""
    every = dict.fromkeys(_places().values())
    inside = {f"BlockWriter.{method}" for method in WRITES_A_WAIT}
    return tuple(edge for edge in every if edge.function not in inside)


def marked(patch: pytest.MonkeyPatch) -> None:
    """Every wait that is lowered from now on says in `op` which edge it is, on which stream."""
    add_wait = BlockWriter.wait
    callers = {getattr(BlockWriter, method).__code__: method for method in WRITES_A_WAIT}

    def wait(writer: BlockWriter, stream: str, event: str) -> None:
        frame, method = sys._getframe(1), "wait"
        if frame.f_code in callers:
            assert frame.f_back is not None
            frame, method = frame.f_back, callers[frame.f_code]
        edge = _places()[Path(frame.f_code.co_filename).name, method, frame.f_lineno]
        add_wait(writer, stream, event)
        writer.actions[-1] = replace(writer.actions[-1], op=f"{edge} on {stream}")

    patch.setattr(BlockWriter, "wait", wait)


def written(case: Case) -> list[str]:
    """The edges of a case's program with their streams, each once."""
    seen: dict[str, None] = {}

    def look(action: Action) -> list[Action]:
        if action.kind is Kind.WAIT:
            seen[action.op] = None
        return [action]

    with pytest.MonkeyPatch.context() as patch:
        marked(patch)
        edited(case, look)
    return list(seen)


def without(case: Case, name: str) -> Case:
    """The case's program without the waits of one edge on one stream."""

    def drop(action: Action) -> list[Action]:
        if action.kind is Kind.WAIT and action.op == name:
            return [replace(action, kind=Kind.EVENT, wait=None, op="")]
        return [action]

    with pytest.MonkeyPatch.context() as patch:
        marked(patch)
        return edited(case, drop)
