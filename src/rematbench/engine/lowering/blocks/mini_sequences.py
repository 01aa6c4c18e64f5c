"""Mini-sequences: runs of operators that are computed in pieces of rows, or of heads.

Tensors between the operators of a run exist one piece at a time (`X%j`). Each piece reads slices of
the run's inputs and writes slices of its outputs; both are whole storages. The sizes of pieces of
rows differ by at most one row. Pieces of heads are equal; if there are fewer key heads than pieces,
several pieces share a key head.
"""

from math import gcd
from typing import NamedTuple

from rematbench.costs.operators.kernels import Attention
from rematbench.costs.operators.ops import Activation, Op, OpTable
from rematbench.engine.program.action import Rows
from rematbench.engine.program.storage import Storage
from rematbench.plan import MiniSequence, PlanError

KEYS = ("k", "v", "k_rows", "v_rows")
"""Tensors whose columns belong to key and value heads, of which there may be fewer than pieces."""


class Piece(NamedTuple):
    """A piece of a mini-sequence: its number, its share of the rows (or heads), and the share
    before it."""

    number: int
    fraction: float
    offset: float

    @property
    def rows(self) -> Rows:
        return Rows(self.fraction, self.offset)


class MiniRun(NamedTuple):
    """Contiguous operators of a table that run in `pieces`. `interior`: tensors that exist only in
    pieces; `outputs`: whole tensors that later operators read; `again`: tensors that each piece
    recomputes in its backward; `key_pieces`: the pieces of key heads (0: pieces of rows)."""

    ops: tuple[Op, ...]
    interior: frozenset[str]
    outputs: tuple[str, ...]
    pieces: tuple[Piece, ...]
    again: frozenset[str] = frozenset()
    key_pieces: int = 0

    def nbytes(self, tensor: Activation, fraction: float) -> int:
        """Bytes of a piece of an interior tensor; `fraction`: the piece's share of the rows."""
        if not self.key_pieces:
            return piece_bytes(tensor, fraction)
        return tensor.nbytes // (self.key_pieces if tensor.name in KEYS else len(self.pieces))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The whole tensors of earlier operators that the run reads."""
        made = {name for op in self.ops for name in op.outputs}
        read = [name for op in self.ops for name in op.inputs if name not in made]
        return tuple(dict.fromkeys(read))

    def storages(self, whole: dict[str, Storage], piece: Piece) -> dict[str, Storage]:
        """Return the storages of a unit's activations during a piece: the pieces of interior
        tensors, and the whole storages of other tensors."""
        return whole | {name: whole[name].of_piece(piece.number) for name in self.interior}


def piece_bytes(tensor: Activation, fraction: float) -> int:
    """Return the bytes of a share of a tensor's rows, rounded down to whole rows."""
    return int(tensor.rows * fraction + 1e-6) * tensor.row_bytes


def mini_runs(
    table: OpTable, sequences: tuple[MiniSequence, ...], *, again: bool = False
) -> dict[str, MiniRun]:
    """Return the runs of an operator table, by first operator. `again`: pieces of rows recompute
    their interior tensors in the backward. PlanError for operators that cannot run in pieces."""
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
            _require_piecewise(op, taken, heads=sequence.of == "heads")
        runs[present[0]] = _run(table, ops, sequence, again=again)
    return runs


def _require_piecewise(op: Op, taken: list[Op], *, heads: bool) -> None:
    """Raise PlanError for an operator that cannot be computed or differentiated in pieces, or that
    belongs to two runs."""
    if not op.row_local and not heads:
        raise PlanError(f"mini-sequence: {op.name} needs all rows, not pieces")
    if op.alias_inputs:
        raise PlanError(
            f"mini-sequence: {op.name} returns whole gradients, so it cannot run in pieces"
        )
    if op in taken:
        raise PlanError(f"{op.name} is in two mini-sequences")


def _run(table: OpTable, ops: tuple[Op, ...], sequence: MiniSequence, *, again: bool) -> MiniRun:
    count = sequence.count
    made = [name for op in ops for name in op.outputs]
    read_after = {name for op in table.ops if op not in ops for name in (*op.inputs, *op.saves)}
    outputs = tuple(name for name in made if name in read_after)
    interior = frozenset(made) - frozenset(outputs)
    if sequence.of == "heads":
        return _run_of_heads(ops, sequence, interior, outputs)
    tensors = [tensor for tensor in table.activations.values() if tensor.differentiable]
    rows = min(tensor.rows for tensor in tensors)  # Gathered tensors have more rows.
    if count > rows:
        raise PlanError(f"mini-sequence of {ops[0].name}: {rows} rows do not make {count} pieces")
    sizes = [rows // count + (1 if j < rows % count else 0) for j in range(count)]
    blocks = max([table.activations[name].block_rows for name in made])
    if any(size % blocks for size in sizes):
        raise PlanError(
            f"mini-sequence of {ops[0].name}: a piece must have a multiple of {blocks} rows"
        )
    pieces = tuple(Piece(j, size / rows, sum(sizes[:j]) / rows) for j, size in enumerate(sizes))
    return MiniRun(ops, interior, outputs, pieces, interior if again else frozenset())


def _run_of_heads(
    ops: tuple[Op, ...], sequence: MiniSequence, interior: frozenset[str], outputs: tuple[str, ...]
) -> MiniRun:
    count = sequence.count
    kernels = [one for op in ops for one in op.forward if isinstance(one, Attention)]
    if not kernels or any(op.gather for op in ops):
        raise PlanError(
            f"mini-sequence {sequence.ops} of heads: its operators must run from the projection "
            "to queries to the end of attention, and none may gather its inputs"
        )
    heads, keys = kernels[0].heads, kernels[0].kv_heads
    if heads % count:
        raise PlanError(
            f"mini-sequence of {ops[0].name}: {heads} heads do not divide into {count} equal pieces"
        )
    pieces = tuple(Piece(j, 1 / count, j / count) for j in range(count))
    kept = {name for op in ops if op.name == "attention" for name in op.outputs}
    again = interior.union(outputs) - kept
    return MiniRun(ops, interior, outputs, pieces, again, gcd(count, keys))
