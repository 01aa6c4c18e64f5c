"""Mini-sequences: runs of row-local operators that are computed in pieces of rows.

Tensors between the operators of a run exist one piece at a time (`X%j`).  The run's inputs are
read, and its outputs written, as slices of whole storages.  The sizes of pieces differ by at most
one row.
"""

from typing import NamedTuple

from rematbench.costs.operators.ops import Op, OpTable
from rematbench.engine.program.storage import Storage
from rematbench.plan import MiniSequence, PlanError


class Piece(NamedTuple):
    """A piece of a mini-sequence: its number, its share of the rows, and the share of rows before
    it."""

    number: int
    fraction: float
    offset: float


class MiniRun(NamedTuple):
    """Contiguous operators of a table, with the interior tensors (which exist in pieces), the
    outputs, and the pieces."""

    ops: tuple[Op, ...]
    interior: frozenset[str]
    outputs: tuple[str, ...]
    pieces: tuple[Piece, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The whole tensors that the run reads from earlier operators."""
        made = {name for op in self.ops for name in op.outputs}
        read = [name for op in self.ops for name in op.inputs if name not in made]
        return tuple(dict.fromkeys(read))

    def storages(self, whole: dict[str, Storage], piece: Piece) -> dict[str, Storage]:
        """Return the storages of a unit's activations in a piece: pieces of interior tensors, and
        the storages in `whole` of all others."""
        return whole | {name: whole[name].of_piece(piece.number) for name in self.interior}


def mini_runs(table: OpTable, sequences: tuple[MiniSequence, ...]) -> dict[str, MiniRun]:
    """Return the runs of an operator table, by first operator.  Raise PlanError for operators that
    cannot run in pieces."""
    runs: dict[str, MiniRun] = {}
    names = [op.name for op in table.ops]
    for sequence in sequences:
        present = [op.name for op in table.ops if (op.adapts or op.name) in sequence.ops]
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
    """Raise PlanError for an operator that cannot be computed or differentiated in pieces, or that
    is in two runs."""
    if not op.row_local:
        raise PlanError(f"mini-sequence: {op.name} is not row-local")
    if op.alias_inputs:
        raise PlanError(
            f"mini-sequence: {op.name} returns whole gradients, so it cannot run in pieces"
        )
    if op in taken:
        raise PlanError(f"{op.name} is in two mini-sequences")


def _run(table: OpTable, ops: tuple[Op, ...], count: int) -> MiniRun:
    made = [name for op in ops for name in op.outputs]
    read_after = {name for op in table.ops if op not in ops for name in (*op.inputs, *op.saves)}
    outputs = tuple(name for name in made if name in read_after)
    tensors = [tensor for tensor in table.activations.values() if tensor.differentiable]
    rows = min(tensor.rows for tensor in tensors)  # of the rank's own shard
    if count > rows:
        raise PlanError(f"mini-sequence of {ops[0].name}: {count} pieces of {rows} rows")
    sizes = [rows // count + (1 if j < rows % count else 0) for j in range(count)]
    blocks = max([table.activations[name].block_rows for name in made])
    if any(size % blocks for size in sizes):
        raise PlanError(f"mini-sequence of {ops[0].name}: pieces must be of {blocks} rows each")
    pieces = tuple(Piece(j, size / rows, sum(sizes[:j]) / rows) for j, size in enumerate(sizes))
    return MiniRun(ops, frozenset(made) - frozenset(outputs), outputs, pieces)
