"""Mini-sequences: a run of row-local operators computed piece by piece along the rows.

Inside a run, tensors between its operators exist one piece at a time (`X%j`); the run's input is
read and its output written as slices of whole storages.  A ragged tail is a smaller last piece.
"""

from typing import NamedTuple

from rematbench.operators.ops import Op, OpTable
from rematbench.plan import MiniSequence, PlanError
from rematbench.program.action import piece_tag


class Piece(NamedTuple):
    """One mini-sequence: its number, its share of the rows and the share before it."""

    number: int
    fraction: float
    offset: float

    @property
    def tag(self) -> str:
        """The end of its names."""
        return piece_tag(self.number)


class MiniRun(NamedTuple):
    """Contiguous operators of one table, the tensors that live piecewise, and the pieces."""

    ops: tuple[Op, ...]
    interior: frozenset[str]
    outputs: tuple[str, ...]
    pieces: tuple[Piece, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the run reads from before it, whole."""
        made = {name for op in self.ops for name in op.outputs}
        read = [name for op in self.ops for name in op.inputs if name not in made]
        return tuple(dict.fromkeys(read))

    def piece_name(self, storage: str, piece: Piece) -> str:
        """Storage of an interior tensor's piece."""
        return storage + piece.tag


def mini_runs(table: OpTable, sequences: tuple[MiniSequence, ...]) -> dict[str, MiniRun]:
    """The runs that start in this table, by their first operator."""
    runs: dict[str, MiniRun] = {}
    names = [op.name for op in table.ops]
    for sequence in sequences:
        present = [name for name in names if name in sequence.ops]
        if not present or sequence.count == 1:
            continue
        first = names.index(present[0])
        if names[first : first + len(present)] != present:
            raise PlanError(f"mini-sequence {sequence.ops}: operators must be contiguous")
        ops = table.ops[first : first + len(present)]
        taken = [op for run in runs.values() for op in run.ops]
        for op in ops:
            _require_piecewise(op, taken)
        runs[present[0]] = _run(table, ops, sequence.count)
    return runs


def _require_piecewise(op: Op, taken: list[Op]) -> None:
    """PlanError for an operator that cannot run, or be differentiated, a piece at a time."""
    if not op.row_local:
        raise PlanError(f"mini-sequence: {op.name} is not row-local")
    if op.alias_inputs:
        raise PlanError(f"mini-sequence: {op.name} passes on whole gradients, not pieces of them")
    if op in taken:
        raise PlanError(f"mini-sequence: {op.name} is in two of them")


def _run(table: OpTable, ops: tuple[Op, ...], count: int) -> MiniRun:
    made = [name for op in ops for name in op.outputs]
    read_after = {name for op in table.ops if op not in ops for name in (*op.inputs, *op.saves)}
    outputs = tuple(name for name in made if name in read_after)
    rows = min(tensor.rows for tensor in table.activations.values())  # of the rank's own shard
    if count > rows:
        raise PlanError(f"mini-sequence of {ops[0].name}: {count} pieces of {rows} rows")
    sizes = [rows // count + (1 if j < rows % count else 0) for j in range(count)]
    pieces = tuple(Piece(j, size / rows, sum(sizes[:j]) / rows) for j, size in enumerate(sizes))
    return MiniRun(ops, frozenset(made) - frozenset(outputs), outputs, pieces)


def unused(sequences: tuple[MiniSequence, ...], tables: list[OpTable]) -> MiniSequence | None:
    """A mini-sequence whose operators no table has (it was meant to do something)."""
    names = {op.name for table in tables for op in table.ops}
    return next((s for s in sequences if names.isdisjoint(s.ops)), None)
