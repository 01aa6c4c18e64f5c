"""Writes a chunk's forward block: operators, collectives, gathers, splits, copies per layer."""

from rematbench.costs.operators.launches import uncaptured
from rematbench.engine.lowering.blocks.chunk_ops import (
    ChunkOps,
    Unit,
    graph_of,
    is_captured,
    stays_in_slots,
    stored_parts,
    trailing_unit,
)
from rematbench.engine.lowering.blocks.fates import Fates
from rematbench.engine.lowering.blocks.mini_sequences import MiniRun, Piece
from rematbench.engine.lowering.blocks.pieces import write_pieces
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.passes.emit_op import (
    OPERANDS,
    Names,
    emit_alloc,
    emit_amaxes,
    emit_copies,
    emit_op,
)
from rematbench.engine.lowering.states.emit_states import ParameterGatherer
from rematbench.engine.program.action import COMPUTE, Action, Alloc, Kind
from rematbench.engine.program.program import Block
from rematbench.engine.program.storage import COPIED_OUT, ENDED, RECEIVED, Event, Slot, Storage
from rematbench.plan import Transfers


class ForwardEmitter:
    def __init__(
        self,
        chunk: ChunkOps,
        fates: Fates,
        transfers: Transfers,
        gatherer: ParameterGatherer | None,
        *,
        beside: bool = False,
    ) -> None:
        self.chunk, self.fates, self.transfers, self.gatherer = chunk, fates, transfers, gatherer
        self.stored = chunk.stored(fates)
        self.w = BlockWriter()
        self.w.beside = "backward" * beside
        self.survivors: set[Storage] = set()
        self.in_flight: list[tuple[Event, tuple[Storage, ...], int]] = []
        self.position = 0
        self.trailing = trailing_unit(chunk, fates, transfers)
        self.trails = False  # whether the last copy in flight is that of the trailing unit

    def block(self) -> Block:
        """Return block F, which computes the chunk's output and keeps what the backward reads."""
        chunk, w = self.chunk, self.w
        early = self.gatherer is not None and self._gathers_early(self.gatherer)
        if self.gatherer and early:  # The stage is idle until its message arrives.
            self.gatherer.before(w, chunk.units, 0)
        if not chunk.first:
            w.wait(COMPUTE, RECEIVED[chunk.ends.word("f", receives=True)])
        for position, unit in enumerate(chunk.units):
            w.begin_unit()
            if self.gatherer and (position or not early):
                self.gatherer.before(w, chunk.units, position)
            self._enter_slot(unit, position)
            self._operators(unit)
            self._store(unit)
            if self.gatherer:
                self.gatherer.after(w, unit)
        self._drain(int(self.trails))
        for _, leaving, _ in self.in_flight:
            self.survivors.update(leaving)
        if not chunk.last:
            self.survivors.add(chunk.output)
        emit_amaxes(w, chunk, OPERANDS)
        w.add(Action(kind=Kind.EVENT, stream=COMPUTE, event=ENDED["f"]))
        arrivals = set() if chunk.first else {chunk.input}
        if self.gatherer:
            self.survivors |= self.gatherer.survivors
        return w.finish("F", self.survivors, arrivals)

    def _gathers_early(self, gatherer: ParameterGatherer) -> bool:
        """Whether gathers of whole steps are issued before the chunk's message arrives, because the
        host does not wait for the message."""
        problem = self.chunk.problem
        held = problem.system.holds_host(problem.layout.vpp)
        return not (gatherer.layerwise or self.chunk.first or held)

    def _enter_slot(self, unit: Unit, position: int) -> None:
        """Assign the unit's offloaded tensors to its rounding buffer, after the copies of the
        buffer's previous tenant are done (the unit's input is not in the buffer). If the chunk's
        backward is the next pass, the saved tensors of the last layers stay in the buffers, because
        no other layer needs these any more."""
        slots = self.transfers.reload_slots
        if self.transfers.granularity != "layer" or slots == 0:
            return
        self.position = position
        tenants = sum(1 for _, _, at in self.in_flight if at > position - slots)
        self._drain(max(tenants, int(self.trails)))
        stays = unit in stays_in_slots(self.chunk, self.fates, slots)
        self.w.slots = (
            {}
            if unit is self.trailing
            else {
                part.storage: Slot(by_layer=True, number=position % slots)
                for _, _, site in self.chunk.saved(unit)
                for part in self.stored[site]
                if (part.offload or stays) and part.storage.part == unit.prefix
            }
        )

    def _operators(self, unit: Unit) -> None:
        runs = self.chunk.runs(unit)
        inside = {op.name for run in runs.values() for op in run.ops}
        storages = self.chunk.storages(unit)
        names = Names(storages, storages, {})
        for op in unit.table.ops:
            if op.name in runs:
                emit_run(self.w, self.chunk, unit, runs[op.name], Kind.FORWARD)
            elif op.name not in inside:
                emit_op(self.w, self.chunk, unit, op, Kind.FORWARD, names)

    def _store(self, unit: Unit) -> None:
        """Split tensors with several fates; with layer granularity, start the copies to the
        host."""
        leaving: list[tuple[Storage, int]] = []
        for _, storage, site in self.chunk.saved(unit):
            parts = self.stored[site]
            self.survivors.update([part.storage for part in parts])
            if self.fates[site].mixed:
                fate = self.fates[site]
                allocs = tuple(Alloc(p.storage, p.nbytes) for p in stored_parts(storage, fate))
                nbytes = sum(alloc.nbytes for alloc in allocs)
                self.w.move(Kind.SPLIT, storage, (storage,), allocs, nbytes)
            leaving += [(part.storage, part.nbytes) for part in parts if part.offload]
        if is_captured(self.chunk.problem, unit):
            self._hold_graph(unit)
        if leaving and self.transfers.granularity == "layer":
            self._copy_out(leaving, COPIED_OUT if unit is self.trailing else None)
            self.trails = unit is self.trailing

    def _hold_graph(self, unit: Unit) -> None:
        problem = self.chunk.problem
        eager = uncaptured(problem.system.kernels, problem.workload, unit.table)
        apart = {name for op in unit.table.ops if op.name in eager for name in op.outputs}
        sites = [site for name, _, site in self.chunk.saved(unit) if name not in apart]
        kept = (part.nbytes for site in sites for part in self.stored[site])
        share = problem.calibration.common.graph_bytes_share
        emit_alloc(self.w, graph_of(unit), int(share * sum(kept)))
        self.survivors.add(graph_of(unit))

    def _copy_out(self, leaving: list[tuple[Storage, int]], event: Event | None) -> None:
        self._drain(self.transfers.release_lag)
        self.w.wait("d2h", self.w.mark(COMPUTE))
        event = emit_copies(self.w, Kind.D2H, leaving, event or self.w.new_event())
        storages = tuple(storage for storage, _ in leaving)
        self.survivors.difference_update(storages)
        self.survivors.update(storage.on_host for storage in storages)
        self.in_flight.append((event, storages, self.position))

    def _drain(self, leave: int) -> None:
        """Wait for the copies of all but the last `leave` layers in flight; free their tensors."""
        while len(self.in_flight) > leave:
            event, storages, _ = self.in_flight.pop(0)
            self.w.wait(COMPUTE, event)
            self.w.free(*storages)


def emit_run(w: BlockWriter, chunk: ChunkOps, unit: Unit, run: MiniRun, kind: Kind) -> None:
    """Emit the forward of all pieces of a run. Each piece writes slices of the run's outputs."""
    for name in run.outputs:
        emit_alloc(w, chunk.storage(unit, name), unit.table.activations[name].nbytes)

    def write(piece: Piece) -> None:
        storages = run.storages(chunk.storages(unit), piece)
        writes = {name: storages[name] for name in run.interior}
        slices = {name: storages[name] for name in run.outputs}
        names = Names(storages, writes, slices, piece=piece.number)
        for op in run.ops:
            emit_op(w, chunk, unit, op, kind, names, piece.rows)

    write_pieces(w, run.pieces, write)
