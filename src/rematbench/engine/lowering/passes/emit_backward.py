"""Writes a chunk's backward block: gradients, collectives, reductions."""

from collections.abc import Callable
from typing import NamedTuple

from rematbench.costs.operators.ops import Op
from rematbench.engine.lowering.blocks.chunk_ops import (
    ChunkOps,
    Unit,
    bytes_of,
    graph_of,
    is_captured,
)
from rematbench.engine.lowering.blocks.fates import Fates
from rematbench.engine.lowering.blocks.mini_sequences import MiniRun, Piece
from rematbench.engine.lowering.blocks.pieces import write_pieces
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.passes.emit_op import GRADIENTS, emit_alloc, emit_amax, emit_amaxes
from rematbench.engine.lowering.passes.emit_recompute import Rebuilder, Recomputer
from rematbench.engine.lowering.passes.emit_reload import Reloader
from rematbench.engine.lowering.states.emit_states import GradReducer, ParameterGatherer, Reduced
from rematbench.engine.lowering.states.ready_pieces import ReadyWriter
from rematbench.engine.program.action import COMPUTE, WHOLE, Action, Alloc, Kind
from rematbench.engine.program.program import Block
from rematbench.engine.program.storage import (
    ENDED,
    NO_PART,
    RECEIVED,
    SENT,
    SHARED_OUT,
    Event,
    Role,
    Storage,
    storage_of,
)
from rematbench.plan import PlanError, Transfers

Storages = list[Storage]

BESIDE = storage_of(NO_PART, "beside")
"""The storage of the tensors that a forward keeps of one layer while it overlaps a backward."""


class InputGradients(NamedTuple):
    """The storages of an operator's input gradients. `written`: those that the kernel writes;
    `summed`: those of `written` that a collective sums; `reduced`: its outputs."""

    written: list[Alloc]
    summed: list[Alloc]
    reduced: list[Alloc]


class Deferred(NamedTuple):
    """An operator whose weight gradients a later pass computes, and the storages that their kernels
    read (`saved`: those of saved inputs)."""

    unit: Unit
    op: Op
    reads: list[Storage]
    saved: list[Storage]


class BackwardEmitter:
    def __init__(
        self,
        chunk: ChunkOps,
        fates: Fates,
        transfers: Transfers,
        gatherer: ParameterGatherer | None,
        reducer: GradReducer | None,
        updater: Callable[[BlockWriter], ReadyWriter] | None = None,
        *,
        beside: bool = False,
        apart: bool = False,
    ) -> None:
        self.chunk, self.fates, self.apart = chunk, fates, apart
        self.deferred: list[Deferred] = []
        self.gatherer, self.reducer = gatherer, reducer
        self.w = BlockWriter()
        self.w.beside = "forward" * beside
        self.updater = updater(self.w) if updater else None
        self.recomputer = Recomputer(chunk, fates, self.w)
        self.rows = WHOLE  # the piece in progress has these rows
        self.grads: dict[Storage, Storage] = {}  # existing gradients by activation
        self.arrivals: set[Storage] = set()
        self.reload = Reloader(chunk, fates, transfers, self.w)
        self.rebuild = Rebuilder(self.recomputer, self._wait_for_inputs)
        self.held: list[
            Storage
        ] = []  # FSDP's root module and hooks keep these until the backward ends.
        self.graphs = self._graphs()
        self.overlap = chunk.problem.tp_overlap in ("backward", "gemm")

    def _wait_for_inputs(self, unit: Unit) -> None:
        self.reload.wait_for(unit)
        if self.gatherer:
            self.gatherer.ready(self.w, unit)

    def block(self) -> Block:
        """Return block B. It computes the gradient of the chunk's input from that of its output,
        and frees all storages that the forward left."""
        chunk, w = self.chunk, self.w
        self._arrive()
        order = list(reversed(chunk.units))
        for position in range(len(order)):
            self._unit(order, position)
        if w.beside or self.held:
            w.free(*[BESIDE][: bool(w.beside)], *self.held)
        survivors = set() if chunk.first or chunk.cut else {self.grads[chunk.input]}
        if self.apart and survivors - {chunk.input.gradient}:
            raise PlanError("separate weight gradients: pieces add to the chunk's input gradient")
        survivors |= {chunk.output} if chunk.local else set()
        survivors.update(*(each.reads for each in self.deferred))
        if self.reducer:
            survivors |= self.reducer.survivors
        if self.updater:  # ENDED comes before, so that the message need not wait for pieces.
            self._start_pieces(self.updater, order[-1])
            survivors |= self.updater.finish(last=chunk.chunk == 0)
        return w.finish("B", survivors, self.arrivals)

    def _unit(self, order: list[Unit], position: int) -> None:
        w, unit = self.w, order[position]
        w.begin_unit()
        if w.beside and position == int(
            self.chunk.last
        ):  # the layer that runs backward first; the head runs before it
            emit_alloc(w, BESIDE, self._beside_bytes())
        self.reload.before(order, position)
        if self.gatherer:
            self.gatherer.before(w, order, position)
        if self.reducer:
            self.reducer.before(w, unit)
        self.rebuild.scopes(unit)
        self._operators(unit)
        if is_captured(self.chunk.problem, unit):
            w.free(graph_of(unit))
        self.reload.after(unit)
        if self.gatherer:
            self._hold(unit, self.gatherer)
            self.gatherer.after(w, unit)
        last = position == len(order) - 1
        # Why: docs/decisions/engine.md, Where does a collective of states slow compute?
        if last:  # The message to the previous stage does not wait for the last reduction.
            emit_amaxes(w, self.chunk, GRADIENTS)
            w.add(Action(kind=Kind.EVENT, stream=COMPUTE, event=ENDED["b"]))
        if self.reducer:
            self.reducer.after(w, unit, last=last)
        if self.updater and unit is not order[-1]:
            self._start_pieces(self.updater, unit)

    def _graphs(self) -> set[int]:
        """The places of sharded layers that are rebuilt in separate autograd graphs
        (`Zero.reentrant`). FSDP does not know the order of these graphs, so it gathers none of
        their layers ahead. Empty in a pipeline, where parameters stay gathered."""
        zero, gatherer = self.chunk.problem.system.zero, self.gatherer
        alone = self.chunk.problem.layout.pp == 1
        fsdp = zero.reentrant and zero.data_parallel == "fsdp" and alone
        if not (fsdp and gatherer and gatherer.layerwise and gatherer.peers):
            return set()
        rebuilt = (site for site, fate in self.fates.items() if fate.recompute_bytes)
        found = {place for part, place, _ in rebuilt if part == "layer"}
        gatherer.in_turn, gatherer.keeps_ends = bool(found), True
        return found

    def _hold(self, unit: Unit, gatherer: ParameterGatherer) -> None:
        """Hold some storages until the end of the backward: the parameters of embedding and head,
        which are one FSDP unit, and the input of a frozen layer with its gradient."""
        work = self.chunk.problem.workload
        frozen = work.lora_rank > 0 and not work.trains("norms")
        if unit.layer < 0 and gatherer.keeps_ends:
            self.held += gatherer.own(unit)
        elif unit.layer >= 0 and unit.place in self.graphs and frozen:
            kept = storage_of(unit.prefix, "held")
            for storage in (kept, kept.gradient):  # Both are as large as the input.
                self.held.append(storage)
                emit_alloc(self.w, storage, unit.table.activations["layer_input"].nbytes)

    def _beside_bytes(self) -> int:
        """The bytes that the overlapping forward keeps of its first layer, before this chunk's
        backward frees a layer. They are those of this chunk's largest layer, because the forward
        runs equal layers. Later layers of the forward use the memory that the backward frees."""
        stored = self.chunk.stored(self.fates)
        return max(
            sum(part.nbytes for _, _, site in self.chunk.saved(unit) for part in stored[site])
            for unit in self.chunk.layer_unit.values()
        )

    def _start_pieces(self, updater: ReadyWriter, unit: Unit) -> None:
        if self.reducer:
            updater.after(self.reducer.reduced)
            self.reducer.reduced = []
        elif unit.prefix in updater.due:
            updater.after([Reduced(unit.prefix, (self.w.mark(COMPUTE),))])

    def _arrive(self) -> None:
        """Declare the storages that are alive when the block starts."""
        chunk, w = self.chunk, self.w
        self.arrivals |= self.reload.start()
        self.arrivals |= {graph_of(u) for u in chunk.units if is_captured(chunk.problem, u)}
        if self.gatherer and self.gatherer.layerwise:
            self.arrivals |= self.gatherer.arrive(w, chunk.units)
        self.rebuild.before_receive()
        if not chunk.last and not chunk.local:
            w.wait(COMPUTE, RECEIVED[chunk.ends.word("b", receives=True)])
            gradient = chunk.output.gradient
            self.grads[chunk.output] = gradient
            self.arrivals.add(gradient)
        elif chunk.shares:
            w.wait(COMPUTE, SHARED_OUT)
            w.wait(COMPUTE, SENT["x"])
            output = chunk.storage(chunk.units[-1], "final_norm_out")
            self.grads[output] = output.gradient
            self.arrivals.add(output.gradient)

    def _operators(self, unit: Unit) -> None:
        runs = {run.ops[-1].name: run for run in self.chunk.runs(unit).values()}
        inside = {op.name for run in runs.values() for op in run.ops}
        for op in reversed(unit.table.ops):
            if op.name in runs:
                self._run(unit, runs[op.name])
            elif op.name not in inside:
                self._backward_op(unit, op)

    def _run(self, unit: Unit, run: MiniRun) -> None:
        for name in map(unit.table.of_gradient, run.inputs):
            storage, tensor = self.chunk.storage(unit, name), unit.table.activations[name]
            if storage not in self.grads and tensor.differentiable:
                self.grads[storage] = storage.gradient
                emit_alloc(self.w, storage.gradient, tensor.nbytes)

        def write(piece: Piece) -> None:
            self.recomputer.run, self.recomputer.piece = run, piece
            self.rows = piece.rows
            for op in reversed(run.ops):
                self._backward_op(unit, op)

        write_pieces(self.w, run.pieces, write, self.recomputer.tensor_sets)
        self.recomputer.run = self.recomputer.piece = None
        self.rows = WHOLE

    def _backward_op(self, unit: Unit, op: Op) -> None:
        w = self.w
        saved = [self.recomputer.ensure(unit, name) for name in op.saves]
        storages = self.recomputer.storages(unit)
        outputs = dict.fromkeys([storages[n] for n in op.outputs])
        incoming = [self.grads[o] for o in outputs if o in self.grads]
        for name in op.alias_inputs:
            self.grads[storages[name]] = incoming[0]
        if op.moves:
            self._exchange(unit, op, incoming)
            self.rebuild.settle()
        if not op.backward_input and not op.backward_weight:
            return
        overlapping = None
        emit_amax(w, unit, op.name, op.grad_amax, incoming)
        if op.grad_gather is not None:
            full = self._between(unit, op, Role.GATHERED_GRADIENT)
            size = int(op.grad_gather.nbytes * self.rows.fraction)
            gathered = op.grad_gather.kind == "all_gather"
            allocs = [Alloc(full, size)] if gathered else []
            event = w.collective(op.grad_gather, unit.prefix, op.name, incoming, allocs, self.rows)
            issued = len(w.actions) - 1
            self.rebuild.window(unit, op.name)
            alone = op.has_weight and bool(op.backward_input) and op.regather is None
            if alone and self.chunk.problem.tp_overlap == "gemm":
                w.wait(COMPUTE, w.mark_begin(issued))
                overlapping = event
            else:
                w.wait(COMPUTE, event)
            incoming = [full] if gathered else incoming
        here = self.recomputer.run is not None  # Later passes cannot work on pieces.
        if self.apart and not here and op.is_matrix and op.backward_weight:
            self.deferred.append(Deferred(unit, op, [*incoming, *saved], saved))
            if op.backward_input:
                reads = [*incoming, *saved]
                reduced = self._input_gradient(unit, op, reads, [], overlapping)
                if reduced:  # No weight-gradient kernel in this pass could overlap the reduction.
                    w.wait(COMPUTE, reduced)
            self.rebuild.settle()
            return
        pending, regathered = self._regather(unit, op, saved)
        pending = pending or overlapping
        self._kernels(unit, op, [*incoming, *saved], regathered, pending)
        self.rebuild.settle()

    def _exchange(self, unit: Unit, op: Op, incoming: list[Storage]) -> None:
        """Emit the backward of an operator that only moves rows: a collective brings the gradients
        back, if the input has gradients."""
        if op.grad_gather is None:
            return
        reads = [*incoming, *self._accumulated(unit, op)]
        made = self._gradients(unit, op).written
        event = self.w.collective(op.grad_gather, unit.prefix, op.name, reads, made, self.rows)
        if op.exchanges:
            self.w.run_beside(unit.variant)
        self.rebuild.window(unit, op.name)
        self.w.wait(COMPUTE, event)

    def _between(self, unit: Unit, op: Op, role: Role) -> Storage:
        return storage_of(unit.prefix, op.name, role, piece=self.recomputer.number)

    def _regather(self, unit: Unit, op: Op, saved: Storages) -> tuple[Event | None, Storages]:
        """Gather the saved input for the backward. Return the gather's end event (None if compute
        has already waited for it), and the gathered storages."""
        if op.regather is None:
            return None, []
        full = self._between(unit, op, Role.GATHERED)
        size = int(op.gathered_bytes * self.rows.fraction)
        allocs = [Alloc(full, size)] if size else []
        event = self.w.collective(op.regather, unit.prefix, op.name, saved, allocs, self.rows)
        ring = op.regather.kind == "ring"
        if ring:  # The kernel reads each part of the ring as it arrives.
            self.w.wait(COMPUTE, self.w.mark_begin(len(self.w.actions) - 1))
        self.rebuild.window(unit, op.name)
        overlaps = (self.overlap and op.has_weight) or ring
        if not overlaps:
            self.w.wait(COMPUTE, event)
        return event if overlaps else None, [full] if allocs else []

    def _kernels(
        self, unit: Unit, op: Op, reads: Storages, regathered: Storages, pending: Event | None
    ) -> None:
        w = self.w
        if op.backward_input:
            pending = self._input_gradient(unit, op, reads, regathered, pending)
        if op.backward_weight:
            where, read = (unit.prefix, unit.variant), [*reads, *regathered]
            beside = "tp" if pending else ""
            w.compute(Kind.BACKWARD_WEIGHT, *where, op, read, [], rows=self.rows, overlaps=beside)
        if pending:
            w.wait(COMPUTE, pending)

    def _input_gradient(
        self, unit: Unit, op: Op, reads: Storages, regathered: Storages, pending: Event | None
    ) -> Event | None:
        """Emit the input-gradient kernel and its reduction. Return the end event of the reduction
        if it may overlap the weight gradient; otherwise None."""
        w, reduced = self.w, op.grad_reduce
        added_into = self._accumulated(unit, op)
        made = self._gradients(unit, op)
        needs_full = [] if op.has_weight else regathered
        where, read = (unit.prefix, unit.variant), [*reads, *needs_full, *added_into]
        beside = (op.regather.group if op.regather else "tp") if pending else ""
        kind, written = Kind.BACKWARD_INPUT, made.written
        w.compute(kind, *where, op, read, written, rows=self.rows, overlaps=beside)
        if pending:
            w.wait(COMPUTE, pending)
        if reduced is None:
            return None
        sources = [*(a.storage for a in made.summed), *added_into]
        event = w.collective(reduced, unit.prefix, op.name, sources, made.reduced, self.rows)
        self.rebuild.window(unit, op.name)
        if self.overlap and op.has_weight:
            return event
        w.wait(COMPUTE, event)
        return None

    def _adds_in_place(self, op: Op, storage: Storage) -> bool:
        """Whether an operator may add to an existing gradient in place, because no later pass reads
        the gradient's present value. Pieces always add to whole gradients."""
        total = self.grads[storage]
        if total is storage.gradient:
            return True
        pieces = self.recomputer.run is not None
        read = any(total in each.reads for each in self.deferred)
        if (pieces and read) or (op.grad_reduce is not None and not pieces):
            raise PlanError(f"separate weight gradients: {op.name} adds to a residual's gradient")
        return pieces

    def _accumulated(self, unit: Unit, op: Op) -> list[Storage]:
        """The gradients (of residuals or whole tensors) to which this operator adds in place."""
        storages, grads = self.recomputer.storages(unit), self.grads
        names = (unit.table.of_gradient(name) for name in op.inputs)
        return [grads[storages[n]] for n in names if storages[n] in grads]

    def _gradients(self, unit: Unit, op: Op) -> InputGradients:
        """The gradients that this operator is the first to write. A reduce-scatter produces all of
        them except the query's, because the query was never gathered. If a later pass computes
        weight gradients, it may read a residual's gradient, which must then stay unchanged; its sum
        with another gradient is a new tensor."""
        tensors, storages = unit.table.activations, self.recomputer.storages(unit)
        fresh: dict[str, Alloc] = {}
        for name in map(unit.table.of_gradient, op.inputs):
            storage = storages[name]
            known = storage in self.grads or name in op.alias_inputs
            if known and self.apart and name not in op.alias_inputs:
                known = self._adds_in_place(op, storage)
            if known or not tensors[name].differentiable:
                continue
            gradient = self.grads[storage] = storage.gradient
            nbytes = bytes_of(self.chunk, unit, name, self.rows.fraction)
            fresh[name] = Alloc(gradient, nbytes)
        reduced = op.grad_reduce
        if reduced is None or reduced.kind != "reduce_scatter":
            whole = list(fresh.values())
            return InputGradients(whole, whole, [])
        size = int(reduced.nbytes * self.rows.fraction)
        part = Alloc(self._between(unit, op, Role.PARTIAL_GRADIENT), size)
        direct = [fresh.pop("q")] if "q" in fresh else []
        return InputGradients([part, *direct], [part], list(fresh.values()))


class WeightEmitter:
    """Builds the half of a chunk's backward that computes the gradients of weights, from the
    tensors that the other half left. Inputs that need a gather are gathered a second time."""

    def __init__(self, first: BackwardEmitter, reducer: GradReducer | None) -> None:
        self.first, self.reducer, self.w = first, reducer, BlockWriter()

    def block(self) -> Block:
        w, chunk, reducer = self.w, self.first.chunk, self.reducer
        self.first.block()
        order = list(reversed(chunk.units))
        arrivals: set[Storage] = set()
        for unit in order:
            w.begin_unit()
            if reducer:
                reducer.before(w, unit)
            for each in self.first.deferred:
                if each.unit is unit:
                    arrivals.update(each.reads)
                    self._kernel(each)
            if reducer:
                reducer.after(w, unit, last=unit is order[-1])
        return w.finish("W", set(reducer.survivors) if reducer else set(), arrivals)

    def _kernel(self, each: Deferred) -> None:
        w, unit, op = self.w, each.unit, each.op
        reads = each.reads
        if op.regather is not None:
            full = storage_of(unit.prefix, op.name, Role.GATHERED)
            allocs = [Alloc(full, op.gathered_bytes)] if op.gathered_bytes else []
            w.wait(COMPUTE, w.collective(op.regather, unit.prefix, op.name, each.saved, allocs))
            reads = [*reads, *(alloc.storage for alloc in allocs)]
        w.compute(Kind.BACKWARD_WEIGHT, unit.prefix, unit.variant, op, reads, [])
