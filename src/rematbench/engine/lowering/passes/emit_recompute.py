"""Recomputes saved tensors in a backward block, whole or in pieces, and joins split tensors.

`Rebuilder` decides when: per layer, per group, or in windows.
"""

from collections.abc import Callable

from msgspec.structs import replace

from rematbench.costs.operators.ops import Comm, Op, rebuild_ops
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps, Unit, rows_of, stored_parts
from rematbench.engine.lowering.blocks.fates import Fates, Resolved
from rematbench.engine.lowering.blocks.mini_sequences import MiniRun, Piece
from rematbench.engine.lowering.blocks.pieces import write_pieces
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.passes.emit_op import Names, emit_alloc, emit_op
from rematbench.engine.program.action import COMPUTE, Action, Alloc, Exchange, Kind, Rows
from rematbench.engine.program.storage import COPY, REBUILT, ModelPart, Storage
from rematbench.plan import Group, PlanError

NOT_AGAIN = (
    "disable moe in recompute_modules, and full recomputation, when enabling "
    "overlap_moe_expert_parallel_comm"
)
"""Megatron-core's message (transformer_config.py) for recomputation that sends experts' tokens
again.  Releases after 0.16.1 refuse the module with it; 0.16.1 silently skips the module's
recomputation.  Full recomputation is in its branch `dev` from July 2026 on (REPLAYS)."""
REPLAYS = "ep_overlap_recompute"
"""The feature of a stack whose layers can run again, exchanges included, although exchanges overlap
another micro-batch."""


class Recomputer:
    """Knows which saved tensors are on the device, and recomputes missing ones.

    `run` and `piece`: the mini-sequence and the piece in progress, if any. Interior tensors then
    have the names of this piece.
    """

    def __init__(self, chunk: ChunkOps, fates: Fates, w: BlockWriter) -> None:
        self.chunk, self.fates, self.w = chunk, fates, w
        self.on_device: set[Storage] = set()
        self.shares: dict[str, float] = {}  # the share of rows that each operator recomputes
        self.rebuilt: set[Storage] = set()  # tensors whose rebuilt rows exist
        self.run: MiniRun | None = None
        self.piece: Piece | None = None
        self.passing = frozenset[str]()  # tensors that are not kept, because pieces recompute them
        self._whole = {unit.prefix: chunk.storages(unit) for unit in chunk.units}
        self._pieces: tuple[object, dict[str, Storage]] = (None, {})
        self._fates = {
            unit.prefix: {name: fates[site] for name, _, site in chunk.saved(unit)}
            for unit in chunk.units
        }
        for unit in chunk.units if chunk.mini_sequences else ():
            for name, _, site in chunk.saved(unit):
                if chunk.run_of(unit, name) and not fates[site].recompute_bytes:
                    self.on_device.update(part.storage for part in chunk.stored(fates)[site])

    @property
    def tensor_sets(self) -> tuple[set[Storage], set[Storage]]:
        """(tensors that are on the device, tensors whose rebuilt rows exist)."""
        return self.on_device, self.rebuilt

    @property
    def number(self) -> int | None:
        return self.piece.number if self.piece else None

    def storages(self, unit: Unit) -> dict[str, Storage]:
        """Return the storages of a unit's activations; inside a run, those of the current piece."""
        run, piece, whole = self.run, self.piece, self._whole[unit.prefix]
        if run is None or piece is None:
            return whole
        if self._pieces[0] != (key := (unit.prefix, run, piece)):
            self._pieces = key, run.storages(whole, piece)
        return self._pieces[1]

    def fate(self, unit: Unit, activation: str) -> Resolved | None:
        """Return the fate of a saved tensor; None for a tensor that no backward needs."""
        return self._fates[unit.prefix].get(activation)

    def rebuild_inside(self, unit: Unit, missing: set[str]) -> None:
        """Rebuild tensors, perhaps while a piece is in progress. Tensors inside the run are rebuilt
        for this piece only, all others with all their rows."""
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
        """Rebuild the whole tensors that a piece reads from operators before its run, because only
        the run's operators can work on pieces."""
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
        storage = self.storages(unit)[name]
        if storage in self.on_device or storage in self.rebuilt:
            return True
        # A tensor inside a run exists only in pieces, so all of them must exist.
        if self.piece is None and (run := self.chunk.run_of(unit, name)):
            pieces = [storage.of_piece(piece.number) for piece in run.pieces]
            if self.on_device.issuperset(pieces):
                return True
        fate = self.fate(unit, name)
        return fate is not None and not fate.recompute_bytes

    def recompute(self, unit: Unit, ops: tuple[Op, ...], missing: set[str]) -> None:
        """Run operators again; operators of a mini-sequence run piece by piece."""
        runs = {op.name: run for run in self.chunk.runs(unit).values() for op in run.ops}
        done: set[str] = set()
        made: dict[str, Storage] = {}
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
        For an output that is not saved, these are the rows that its readers among `ops` need, or
        all rows if the output itself is in `missing`."""
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
        self, unit: Unit, run: MiniRun, ops: list[Op], missing: set[str], made: dict[str, Storage]
    ) -> None:
        for name in run.outputs:
            if any(name in op.outputs for op in ops):
                passes = name in run.again - missing
                storage = self._run_output(unit, name, passes=passes)
                emit_alloc(self.w, storage, unit.table.activations[name].nbytes)
                made[name] = storage
        if ops[0].exchanges:  # No kernel precedes its collective, which waits for this event.
            self.w.add(Action(kind=Kind.EVENT, stream=COMPUTE, event=self.w.new_event()))
        self.passing = run.again - missing

        def write(piece: Piece) -> None:
            self.run, self.piece = run, piece
            inner = dict(made)
            for op in ops:
                self._recompute_op(unit, op, missing, inner)

        write_pieces(self.w, run.pieces, write, self.tensor_sets)
        self.run = self.piece = None
        self.passing = frozenset()

    def _run_output(self, unit: Unit, name: str, *, passes: bool) -> Storage:
        """The storage of a rebuilt output of a mini-sequence: the saved tensor's storage if the
        tensor was dropped; a copy if it was not, or if it `passes` (each piece rebuilds it again).
        PlanError for a mixed fate."""
        storage = self.chunk.storage(unit, name)
        fate = self.fate(unit, name)
        if passes or fate is None or not fate.recompute_bytes or storage in self.on_device:
            return storage.with_rows(COPY)
        if fate.mixed:
            raise PlanError(
                f"{storage} is computed in a mini-sequence: recompute all of it or none of it"
            )
        self.on_device.add(storage)
        return storage

    def _recompute_op(
        self, unit: Unit, op: Op, missing: set[str], made: dict[str, Storage]
    ) -> None:
        problem, fates = self.chunk.problem, self._fates[unit.prefix].values()
        if op.exchanges and problem.ep_overlaps:
            layers = REPLAYS in problem.system.accepts.features
            if not (layers and any(fate.whole for fate in fates)):
                words = f"ep_overlap does not allow {op.name} to be recomputed"
                raise PlanError(f"{words}: {NOT_AGAIN}")
        fraction = self.shares[op.name]
        if fraction < 1.0 and not op.row_local:
            raise PlanError(f"{op.name} needs all rows: recompute all of them or none")
        reads = {name: self._source(unit, name, made, fraction) for name in op.inputs}
        # If only a piece is rebuilt, `made` has no whole output of the run that could be written.
        slices = {
            n: made[n] for n in op.outputs if self.run and n in self.run.outputs and n in made
        }
        writes = self._outputs(unit, op, missing)
        # The rebuilt rows of a split tensor are its last rows.
        rows = self.piece.rows if self.piece else Rows(fraction, 1.0 - fraction)
        columns = self._columns(unit, op, writes)
        names = Names(reads, writes, slices, COPY, self.number, columns)
        emit_op(self.w, self.chunk, unit, op, Kind.RECOMPUTE, names, rows)
        made |= writes

    def _columns(self, unit: Unit, op: Op, writes: dict[str, Storage]) -> float:
        """The share of a linear's output columns to recompute: all if a single GEMM computes all
        outputs; otherwise the columns of the outputs in `writes`."""
        if self.chunk.problem.system.kernels.fused_linears or not op.is_matrix or not writes:
            return 1.0
        width = {name: unit.table.activations[name].row_bytes for name in op.outputs}
        return sum(width[name] for name in writes) / sum(width.values())

    def _source(self, unit: Unit, name: str, made: dict[str, Storage], fraction: float) -> Storage:
        """The storage that an operator reads: the storage in `made` if it has enough rows,
        otherwise the whole tensor."""
        fate = self.fate(unit, name)
        storage = made.get(name)
        if storage is None and not self._available(unit, name):
            raise PlanError(_orphan(self.chunk.storage(unit, name)))
        fewer = fate is not None and rows_of([fate]) < fraction
        if storage is None or (storage.rows == REBUILT and fewer):
            return self.ensure(unit, name)
        return storage

    def _outputs(self, unit: Unit, op: Op, missing: set[str]) -> dict[str, Storage]:
        """The storages that recomputation writes: missing tensors, and inputs of later
        operators."""
        writes: dict[str, Storage] = {}
        storages = self.storages(unit)
        for name in op.outputs:
            storage = storages[name]
            of_run = self.run is not None and name in self.run.outputs
            if of_run or storage in self.on_device or self._available(unit, name):
                continue
            fate = self.fate(unit, name)
            wanted = name in missing or (fate is not None and fate.recompute_bytes > 0)
            if not wanted or name in self.passing:
                writes[name] = storage.with_rows(COPY) if name == "layer_output" else storage
            elif fate is not None and fate.mixed:
                writes[name] = storage.with_rows(REBUILT)
                self.rebuilt.add(storage)
            else:
                writes[name] = storage
                self.on_device.add(storage)
        return writes

    def ensure(self, unit: Unit, name: str) -> Storage:
        """Return the storage of a whole saved tensor on the device, after rebuilding or joining the
        tensor if necessary. Raise PlanError if the tensor is not saved or has no producer."""
        storage = self.storages(unit)[name]
        if storage in self.on_device:
            return storage
        fate = self.fate(unit, name)
        if fate is None:
            raise PlanError(f"the backward needs {storage}, but no rule saves or recomputes it")
        if fate.recompute_bytes and storage not in self.rebuilt:
            if unit.table.producer(name) is None:
                raise PlanError(_orphan(storage))
            self.rebuild_inside(unit, {name})
        if fate.mixed:
            self._join(storage, fate)
        self.on_device.add(storage)
        return storage

    def _join(self, storage: Storage, fate: Resolved) -> None:
        parts = [part.storage for part in stored_parts(storage, fate)]
        if fate.recompute_bytes:
            parts.append(storage.with_rows(REBUILT))
        whole = Alloc(storage, fate.nbytes)
        if fate.peer_bytes:
            comm = Comm("all_gather", "tp", fate.nbytes)
            done = self.w.collective(comm, storage.part, storage.label, parts, [whole])
            self.w.wait(COMPUTE, done)
            return
        self.w.move(Kind.JOIN, storage, tuple(parts), (whole,), fate.nbytes)


def _orphan(storage: Storage) -> str:
    return f"{storage}: recomputation needs it, but it is dropped and no operator computes it"


class Rebuilder:
    """Decides when tensors are rebuilt, at the points before their readers that the plan names.
    `Recomputer` emits the operators."""

    def __init__(self, recomputer: Recomputer, arrive: Callable[[Unit], None]) -> None:
        self.recomputer, self.chunk, self.fates = recomputer, recomputer.chunk, recomputer.fates
        self.windows = any(fate.window is not None for fate in self.fates.values())
        self.visited: set[ModelPart] = set()  # units that were rebuilt as a layer or in a group
        self.arrive = arrive  # called before a unit is rebuilt early
        self.stalls: list[Action] = []  # emitted when the collective of their window is done

    def scopes(self, unit: Unit) -> None:
        """Rebuild the tensors of layer or group scope that are due before this unit's backward."""
        due = [unit]
        fates = (self.fates[site] for _, _, site in self.chunk.saved(unit))
        for group in {f.scope for f in fates if f.recompute_bytes and isinstance(f.scope, Group)}:
            due = [
                self.chunk.layer_unit[i]
                for i, layer in enumerate(self.chunk.layers)
                if group.first <= layer <= group.last and i <= unit.place
            ]
        for member in due:
            if member.prefix != unit.prefix:
                self.arrive(member)
            self._rebuild_unit(member, last=member.prefix == unit.prefix)

    def window(self, consumer: Unit, op: str) -> None:
        """Rebuild the tensors whose window is the collective that was just issued, `layer_offset`
        layers before their use."""
        if not self.windows:
            return
        maker = self.recomputer
        issued = len(maker.w.actions)
        at_work = maker.run, maker.piece
        for unit in self.chunk.units:
            maker.run, maker.piece = at_work if unit.prefix == consumer.prefix else (None, None)
            missing = {
                name
                for name, _, site in self.chunk.saved(unit)
                if (w := self.fates[site].window) is not None
                and (w.op, w.direction) == (op, "backward")
                and unit.place == consumer.place - w.layer_offset
                and unit.table.part == consumer.table.part
                and maker.storages(unit)[name] not in maker.on_device
            }
            if missing:
                self.arrive(unit)
                maker.rebuild_inside(unit, missing)
        maker.run, maker.piece = at_work
        self._note_stalls(issued)

    def _note_stalls(self, issued: int) -> None:
        """Record a stall for each kernel that is recomputed during a collective. Both use the GPU's
        SMs and HBM, so the longer of the two takes more time; the stall is this time."""
        actions = self.recomputer.w.actions
        before = reversed(actions[:issued])
        comm = next((a.exchange.comm for a in before if a.stream != COMPUTE), None)
        self.stalls += [
            replace(
                action,
                kind=Kind.STALL,
                exchange=Exchange(comm),
                reads=(),
                allocs=(),
                event=None,
                scratch=0,
            )
            for action in actions[issued:]
            if comm is not None and action.kind is Kind.RECOMPUTE
        ]

    def settle(self) -> None:
        """Emit the recorded stalls; their collectives are done."""
        for stall in self.stalls:
            self.recomputer.w.add(stall)
        self.stalls = []

    def before_receive(self) -> None:
        for unit in self.chunk.units:
            missing = {
                name
                for name, _, site in self.chunk.saved(unit)
                if (w := self.fates[site].window) is not None and w.direction == "before_recv"
            }
            if missing:
                self.arrive(unit)
                self.recomputer.rebuild(unit, missing)

    def _rebuild_unit(self, unit: Unit, *, last: bool) -> None:
        wanted = [
            (name, self.fates[site])
            for name, storage, site in self.chunk.saved(unit)
            if self.fates[site].recompute_bytes
            and self.fates[site].scope != "consumer"
            and storage not in self.recomputer.on_device
            # With its group a tensor in pieces is rebuilt once; later each piece rebuilds itself.
            and not (unit.prefix in self.visited and self.chunk.run_of(unit, name))
        ]
        missing = {name for name, _ in wanted if unit.table.producer(name) is not None}
        if not last and not self._kept(self.chunk.storage(unit, "layer_output")):
            missing.add("layer_output")
        self.visited.add(unit.prefix)
        if any(fate.whole for _, fate in wanted) and missing:
            self.recomputer.recompute(unit, unit.table.ops, missing)
        elif missing:
            self.recomputer.rebuild(unit, missing)

    def _kept(self, storage: Storage) -> bool:
        """Whether a storage is on the device or returns without recomputation."""
        if storage in self.recomputer.on_device:
            return True
        return any(
            storage is saved and not self.fates[site].recompute_bytes
            for unit in self.chunk.units
            for _, saved, site in self.chunk.saved(unit)
        )
