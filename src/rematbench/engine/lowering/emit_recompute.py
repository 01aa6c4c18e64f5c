"""Recomputes saved tensors in a backward block, whole or in pieces, and joins split tensors."""

from rematbench.costs.operators.ops import Op, rebuild_ops
from rematbench.engine.lowering.chunk_ops import ChunkOps, Unit, rows_of, stored_parts
from rematbench.engine.lowering.emit_forward import Fates
from rematbench.engine.lowering.emit_op import Names, emit_alloc, emit_op
from rematbench.engine.lowering.fates import Resolved
from rematbench.engine.lowering.mini_sequences import MiniRun, Piece
from rematbench.engine.lowering.pieces import write_pieces
from rematbench.engine.lowering.writer import BlockWriter, Share
from rematbench.engine.program.action import COMPUTE, Action, Alloc, Kind, place
from rematbench.plan import PlanError


class Recomputer:
    """Tracks the saved tensors that are on the device, and recomputes the missing tensors.

    `piece` is the mini-sequence piece in progress, if any.  Interior tensors then have the names of
    this piece.
    """

    def __init__(self, chunk: ChunkOps, fates: Fates, w: BlockWriter) -> None:
        self.chunk, self.fates, self.w = chunk, fates, w
        self.on_device: set[str] = set()
        self.shares: dict[str, float] = {}  # share of rows of each operator in recomputation
        self.rebuilt: set[str] = set()  # `#r` parts that exist
        self.run: MiniRun | None = None
        self.piece: Piece | None = None
        self._whole = {unit.prefix: chunk.names(unit) for unit in chunk.units}
        self._named: tuple[str, MiniRun | None, Piece | None, dict[str, str]] = ("", None, None, {})
        self._fates = {
            unit.prefix: {name: fates[site] for name, _, site in chunk.saved(unit)}
            for unit in chunk.units
        }
        for unit in chunk.units if chunk.mini_sequences else ():
            for name, _, site in chunk.saved(unit):
                if chunk.run_of(unit, name) and not fates[site].recompute_bytes:
                    self.on_device.update(part.name for part in chunk.stored(fates)[site])

    @property
    def tensor_sets(self) -> tuple[set[str], set[str]]:
        """The sets of names of existing tensors and of rebuilt parts."""
        return self.on_device, self.rebuilt

    @property
    def tag(self) -> str:
        """The name suffix of the piece in progress.  Empty outside of runs."""
        return self.piece.tag if self.piece else ""

    def names(self, unit: Unit) -> dict[str, str]:
        """Return the storage names of a unit's activations, with the piece's suffix inside a
        run."""
        run, piece, prefix = self.run, self.piece, unit.prefix
        if run is None or piece is None:
            return self._whole[prefix]
        if self._named[:3] != (prefix, run, piece):
            self._named = (prefix, run, piece, run.names(self._whole[prefix], piece))
        return self._named[3]

    def fate(self, unit: Unit, activation: str) -> Resolved | None:
        """Return the fate of a saved tensor; None for a tensor that no backward needs."""
        return self._fates[unit.prefix].get(activation)

    def rebuild_inside(self, unit: Unit, missing: set[str]) -> None:
        """Rebuild tensors while a piece may be in progress.  Tensors inside the run are rebuilt for
        this piece only, all further tensors for all rows."""
        at_work = self.run, self.piece
        pieces = missing & self.run.interior if self.run else set()
        if pieces:
            self.rebuild(unit, pieces)
        self.run = self.piece = None
        if missing - pieces:
            self.rebuild(unit, missing - pieces)
        self.run, self.piece = at_work

    def rebuild(self, unit: Unit, missing: set[str]) -> None:
        """Recompute the `missing` tensors with the operators that produce them."""
        if self.run is not None:
            self._whole_inputs(unit, self.run)
        available = frozenset([n for n in unit.table.activations if self._available(unit, n)])
        ops = rebuild_ops(unit.table, frozenset(missing), available)
        self.recompute(unit, ops, missing)

    def _whole_inputs(self, unit: Unit, run: MiniRun) -> None:
        """Rebuild, as whole tensors, the tensors that a piece reads from before its run: only
        operators of the run work on pieces."""
        names = [name for op in run.ops for name in op.inputs if name not in run.interior]
        while names:
            name = names.pop()
            if self._available(unit, name):
                continue
            producer = unit.table.producer(name)
            if self.fate(unit, name) is not None:
                self.ensure(unit, name)
            elif producer is not None:
                names += producer.inputs

    def _available(self, unit: Unit, name: str) -> bool:
        storage = self.names(unit)[name]
        if storage in self.on_device or (self.rebuilt and f"{storage}#r" in self.rebuilt):
            return True
        fate = self.fate(unit, name)
        return fate is not None and not fate.recompute_bytes

    def recompute(self, unit: Unit, ops: tuple[Op, ...], missing: set[str]) -> None:
        """Run operators again; operators of a mini-sequence run piece by piece."""
        runs = {op.name: run for run in self.chunk.runs(unit).values() for op in run.ops}
        done: set[str] = set()
        made: dict[str, str] = {}
        outer, self.shares = self.shares, self._shares(unit, ops, missing)
        for op in ops:
            run = runs.get(op.name)
            if run is None or self.piece is not None:
                self._recompute_op(unit, op, missing, made)
            elif op.name not in done:
                inside = [o for o in run.ops if o in ops]
                done.update(o.name for o in inside)
                self._recompute_pieces(unit, run, inside, missing, made)
        self.shares = outer

    def _shares(self, unit: Unit, ops: tuple[Op, ...], missing: set[str]) -> dict[str, float]:
        """The share of rows that each operator recomputes: the missing rows of its saved outputs.
        An output that is not saved needs the rows that its readers among `ops` need, or all rows if
        the output itself is wanted."""
        shares: dict[str, float] = {}
        for op in reversed(ops):
            fates = [self.fate(unit, name) for name in op.outputs]
            share = rows_of([fate for fate in fates if fate and fate.recompute_bytes])
            for name, fate in zip(op.outputs, fates, strict=True):
                readers = [shares[o.name] for o in ops if name in o.inputs and o.name in shares]
                if fate is None:
                    share = max([share, float(name in missing), *readers])
            shares[op.name] = share or 1.0
        return shares

    def _recompute_pieces(
        self, unit: Unit, run: MiniRun, ops: list[Op], missing: set[str], made: dict[str, str]
    ) -> None:
        for name in run.outputs:
            if any(name in op.outputs for op in ops):
                storage = self._run_output(unit, name)
                emit_alloc(self.w, storage, unit.table.activations[name].nbytes)
                made[name] = storage

        def write(piece: Piece) -> None:
            self.run, self.piece = run, piece
            inner = dict(made)
            for op in ops:
                self._recompute_op(unit, op, missing, inner)

        write_pieces(self.w, run.pieces, write, self.tensor_sets)
        self.run = self.piece = None

    def _run_output(self, unit: Unit, name: str) -> str:
        """The storage of a rebuilt mini-sequence output: the saved tensor's own storage if it was
        dropped.  PlanError for a mixed fate."""
        storage = self.chunk.storage(unit, name)
        fate = self.fate(unit, name)
        if fate is None or not fate.recompute_bytes or storage in self.on_device:
            return f"{storage}.r"
        if fate.mixed:
            raise PlanError(
                f"{storage} is computed in a mini-sequence: recompute all of it or none"
            )
        self.on_device.add(storage)
        return storage

    def _recompute_op(self, unit: Unit, op: Op, missing: set[str], made: dict[str, str]) -> None:
        fraction = self.shares[op.name]
        if fraction < 1.0 and not op.row_local:
            raise PlanError(f"{op.name} is not row-local: recompute all of its rows or none")
        reads = {name: self._source(unit, name, made, fraction) for name in op.inputs}
        # While a piece is rebuilt, `made` lacks the run's whole outputs: no reader needs them.
        slices = {
            n: made[n] for n in op.outputs if self.run and n in self.run.outputs and n in made
        }
        writes = self._outputs(unit, op, missing) if not slices else {}
        tag = f".r{self.tag}"
        if self.piece:
            share = Share(self.piece.fraction, self.piece.offset)
        else:
            share = Share(fraction, 1.0 - fraction)  # a partial rebuild covers the last rows
        names = Names(reads, writes, slices, tag, self._columns(unit, op, writes))
        emit_op(self.w, self.chunk, unit, op, Kind.RECOMPUTE, names, share)
        made |= writes

    def _columns(self, unit: Unit, op: Op, writes: dict[str, str]) -> float:
        """The share of a linear's output columns to recompute: all if a single GEMM makes all
        outputs, otherwise the columns of the outputs that are written."""
        if self.chunk.problem.system.kernels.fused_linears or not op.has_weight or not writes:
            return 1.0
        width = {name: unit.table.activations[name].row_bytes for name in op.outputs}
        return sum(width[name] for name in writes) / sum(width.values())

    def _source(self, unit: Unit, name: str, made: dict[str, str], fraction: float) -> str:
        """The storage that an operator reads: the rows in `made` if they suffice, otherwise the
        whole tensor."""
        fate = self.fate(unit, name)
        storage = made.get(name, "")
        if storage.endswith("#r") and fate is not None and rows_of([fate]) < fraction:
            return self.ensure(unit, name)
        return storage or self._input(unit, name)

    def _input(self, unit: Unit, name: str) -> str:
        if not self._available(unit, name):
            raise PlanError(_orphan(self.chunk.storage(unit, name)))
        return self.ensure(unit, name)

    def _outputs(self, unit: Unit, op: Op, missing: set[str]) -> dict[str, str]:
        """The storages that recomputation writes: missing tensors and inputs of later operators."""
        writes: dict[str, str] = {}
        names = self.names(unit)
        for name in op.outputs:
            storage = names[name]
            of_run = self.run is not None and name in self.run.outputs
            if of_run or storage in self.on_device or self._available(unit, name):
                continue
            fate = self.fate(unit, name)
            wanted = name in missing or (fate is not None and fate.recompute_bytes > 0)
            if not wanted:
                writes[name] = f"{storage}.r" if name == "layer_output" else storage
            elif fate is not None and fate.mixed:
                writes[name] = f"{storage}#r"
                self.rebuilt.add(f"{storage}#r")
            else:
                writes[name] = storage
                self.on_device.add(storage)
        return writes

    def ensure(self, unit: Unit, name: str) -> str:
        """Return the storage of a whole saved tensor on the device, after rebuilding or joining it
        if necessary.  Raise PlanError if the tensor is not saved or has no producer."""
        storage = self.names(unit)[name]
        if storage in self.on_device:
            return storage
        fate = self.fate(unit, name)
        if fate is None:
            raise PlanError(f"the backward needs {storage}, but no rule saves or recomputes it")
        if fate.recompute_bytes and f"{storage}#r" not in self.rebuilt:
            if unit.table.producer(name) is None:
                raise PlanError(_orphan(storage))
            self.rebuild_inside(unit, {name})
        if fate.mixed:
            self._join(storage, fate)
        self.on_device.add(storage)
        return storage

    def _join(self, storage: str, fate: Resolved) -> None:
        parts = [part.name for part in stored_parts(storage, fate)]
        if fate.recompute_bytes:
            parts.append(f"{storage}#r")
        part, tensor = place(storage)
        self.w.add(
            Action(
                kind=Kind.JOIN,
                stream=COMPUTE,
                part=part,
                op=tensor,
                reads=tuple(parts),
                allocs=(Alloc(storage, fate.nbytes),),
                nbytes=fate.nbytes,
            )
        )


def _orphan(storage: str) -> str:
    return f"{storage}: recomputation needs it, but it is dropped and has no producer"
