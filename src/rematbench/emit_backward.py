"""Write a chunk's backward block: reloads, rebuilds, joins, gradients, collectives, reductions."""

from rematbench.action import HOST, Action, Alloc, Kind
from rematbench.chunk_ops import ChunkOps, Unit, rows_of, stored_parts
from rematbench.emit_forward import Fates, emit_op
from rematbench.emit_states import GradReducer, ParameterGatherer
from rematbench.ops import Op
from rematbench.plan import Group, PlanError, Transfers
from rematbench.problem import rebuild_ops
from rematbench.program import Block
from rematbench.writer import COMPUTE, BlockWriter


class BackwardEmitter:
    """The backward block of one chunk under resolved fates."""

    def __init__(
        self,
        chunk: ChunkOps,
        fates: Fates,
        transfers: Transfers,
        gatherer: ParameterGatherer | None,
        reducer: GradReducer | None,
    ) -> None:
        self.chunk, self.fates, self.transfers = chunk, fates, transfers
        self.gatherer, self.reducer = gatherer, reducer
        self.w = BlockWriter()
        self.have: dict[str, str] = {}  # activation storage -> whole tensor on the device
        self.rebuilt: set[str] = set()  # `#r` parts that exist
        self.grads: dict[str, str] = {}  # activation storage -> gradient storage
        self.arrivals: set[str] = set()
        self.fetched: dict[int, str] = {}
        self.offloaded = self._offloaded()

    def _offloaded(self) -> dict[str, list[tuple[str, int]]]:
        """Offloaded storages by unit prefix."""
        table: dict[str, list[tuple[str, int]]] = {}
        for unit in self.chunk.units:
            for _, storage, site in self.chunk.saved(unit):
                parts = stored_parts(storage, self.fates[site])
                leaving = [(p.name, p.nbytes) for p in parts if p.offload]
                if leaving:
                    table.setdefault(unit.prefix, []).extend(leaving)
        return table

    def block(self) -> Block:
        """B: from the output's gradient to the input's; frees everything the forward left."""
        chunk, w = self.chunk, self.w
        self._arrive()
        order = list(reversed(chunk.units))
        for position, unit in enumerate(order):
            self._fetch_layers(order, position)
            if self.gatherer:
                self.gatherer.before(w, order, position)
            if self.reducer:
                self.reducer.before(w, unit)
            self._rebuild_scopes(unit)
            for op in reversed(unit.table.ops):
                self._backward_op(unit, op)
            if self.gatherer:
                self.gatherer.after(w, unit)
            if self.reducer:
                self.reducer.after(w, unit, last=position == len(order) - 1)
        survivors = set() if chunk.first else {self.grads[chunk.input_name]}
        w.add(Action(kind=Kind.EVENT, stream=COMPUTE, event="b_end"))
        return Block("B", w.finish("B", survivors, self.arrivals))

    def _arrive(self) -> None:
        """What is alive when the block starts."""
        chunk, w = self.chunk, self.w
        if not chunk.last:
            w.wait(COMPUTE, "recv_b")
            gradient = f"d:{chunk.output_name}"
            self.grads[chunk.output_name] = gradient
            self.arrivals.add(gradient)
        by_chunk = self.transfers.granularity == "chunk"
        for unit in chunk.units:
            for _, storage, site in chunk.saved(unit):
                for part in stored_parts(storage, self.fates[site]):
                    if not part.offload:
                        self.arrivals.add(part.name)
                    elif by_chunk:
                        self.arrivals |= {part.name, part.name + HOST}
                    else:
                        self.arrivals.add(part.name + HOST)
        if by_chunk and self.offloaded:
            w.wait(COMPUTE, "h2d")
            names = tuple(n + HOST for parts in self.offloaded.values() for n, _ in parts)
            w.add(Action(kind=Kind.FREE, stream=COMPUTE, frees=names))
        if self.gatherer and self.gatherer.fate.release == "backward":
            self._resident_parameters()

    def _resident_parameters(self) -> None:
        """Parameters gathered in the forward and kept (ZeRO-2 as FSDP's shard-grad-op does)."""
        assert self.gatherer is not None
        event = self.w.mark(COMPUTE)
        for unit in self.chunk.units:
            if unit.parameters:
                self.gatherer.pending[unit.prefix] = event
                self.arrivals.add(self.gatherer.buffer(unit))

    def _fetch_layers(self, order: list[Unit], position: int) -> None:
        """Layer granularity: start H2D copies ahead, wait for this unit's, free host copies."""
        if self.transfers.granularity != "layer":
            return
        for ahead, unit in enumerate(order[: position + self.transfers.prefetch_layers + 1]):
            if unit.prefix in self.offloaded and ahead not in self.fetched:
                self.w.wait("h2d", self.w.mark(COMPUTE))
                self.fetched[ahead] = emit_copies_in(
                    self.w, unit.prefix, self.offloaded[unit.prefix], self.w.new_event()
                )
        if position in self.fetched:
            self.w.wait(COMPUTE, self.fetched[position])
            names = tuple(n + HOST for n, _ in self.offloaded[order[position].prefix])
            self.w.add(Action(kind=Kind.FREE, stream=COMPUTE, frees=names))

    # -- rebuilding ---------------------------------------------------------------------------

    def _rebuild_scopes(self, unit: Unit) -> None:
        """Layer- and group-scoped recomputation that is due when this unit's backward starts."""
        due = [unit]
        groups = {
            fate.scope
            for _, _, site in self.chunk.saved(unit)
            if isinstance((fate := self.fates[site]).scope, Group) and fate.recompute_bytes
        }
        for group in groups:
            due = [
                self.chunk.layer_unit[i]
                for i, layer in enumerate(self.chunk.layers)
                if group.first <= layer <= group.last and i <= unit.index
            ]
        for member in due:
            self._rebuild_unit(member, last=member.prefix == unit.prefix)

    def _rebuild_unit(self, unit: Unit, *, last: bool) -> None:
        wanted = [
            (name, storage, self.fates[site])
            for name, storage, site in self.chunk.saved(unit)
            if self.fates[site].recompute_bytes
            and self.fates[site].scope != "consumer"
            and storage not in self.have
        ]
        missing = {name for name, _, _ in wanted if unit.table.producer(name) is not None}
        inner = not last and f"L{unit.index + 1}.layer_input" not in self._kept()
        if inner:
            missing.add("layer_output")
        if any(fate.whole for _, _, fate in wanted) and missing:
            self._rerun(unit, unit.table.ops, missing)
        elif missing:
            self._rebuild(unit, missing)

    def _kept(self) -> set[str]:
        """Storages that need no rebuilding at all."""
        names = {
            storage
            for unit in self.chunk.units
            for _, storage, site in self.chunk.saved(unit)
            if not self.fates[site].recompute_bytes
        }
        return names | set(self.have)

    def _rebuild(self, unit: Unit, missing: set[str]) -> None:
        """Re-run the operators that produce `missing`."""
        available = frozenset(
            name for name in unit.table.activations if self._available(unit, name)
        )
        self._rerun(unit, rebuild_ops(unit.table, frozenset(missing), available), missing)

    def _available(self, unit: Unit, name: str) -> bool:
        storage = self.chunk.storage(unit, name)
        if storage in self.have:
            return True
        fate = self.fates.get(self.chunk.site(unit, name))
        return fate is not None and not fate.recompute_bytes

    def _rerun(self, unit: Unit, ops: tuple[Op, ...], missing: set[str]) -> None:
        made: dict[str, str] = {}
        for op in ops:
            fates = [
                fate
                for name in op.outputs
                if (fate := self.fates.get(self.chunk.site(unit, name))) and fate.recompute_bytes
            ]
            fraction = rows_of(op, fates) or 1.0
            if fraction < 1.0 and not op.row_local:
                raise PlanError(f"{op.name} is not row-local: recompute all of its rows or none")
            reads = {name: made.get(name) or self._rebuild_input(unit, name) for name in op.inputs}
            writes = self._rebuild_outputs(unit, op, missing, fraction)
            emit_op(self.w, self.chunk, unit, op, Kind.RECOMPUTE, reads, writes, fraction)
            made |= writes

    def _rebuild_input(self, unit: Unit, name: str) -> str:
        storage = self.chunk.storage(unit, name)
        if storage not in self.have and not self._available(unit, name):
            raise PlanError(f"{storage}: recomputation needs it, but it is dropped and has no producer")
        return self._ensure(unit, name)

    def _rebuild_outputs(
        self, unit: Unit, op: Op, missing: set[str], fraction: float
    ) -> dict[str, str]:
        """Storages an operator's re-run writes: the missing ones, and inputs of later re-runs."""
        writes: dict[str, str] = {}
        for name in op.outputs:
            storage = self.chunk.storage(unit, name)
            if storage in self.have or self._available(unit, name):
                continue
            fate = self.fates.get(self.chunk.site(unit, name))
            wanted = name in missing or (fate is not None and fate.recompute_bytes > 0)
            if not wanted:
                writes[name] = f"{storage}.r" if name == "layer_output" else storage
            elif fate is not None and fate.mixed:
                writes[name] = f"{storage}#r"
                self.rebuilt.add(f"{storage}#r")
            else:
                writes[name] = storage
                self.have[storage] = storage
        return writes

    def _ensure(self, unit: Unit, name: str) -> str:
        """The storage of a whole saved tensor on the device, rebuilt or joined if need be."""
        storage = self.chunk.storage(unit, name)
        if storage in self.have:
            return self.have[storage]
        fate = self.fates.get(self.chunk.site(unit, name))
        if fate is None:
            raise PlanError(f"{storage} is needed in the backward but never saved")
        if fate.recompute_bytes and f"{storage}#r" not in self.rebuilt:
            self._rebuild(unit, {name})
        if fate.mixed:
            self._join(unit, storage, fate.nbytes, fate.recompute_bytes > 0)
        self.have[storage] = storage
        return storage

    def _join(self, unit: Unit, storage: str, nbytes: int, rebuilt: bool) -> None:
        site = next(s for _, n, s in self.chunk.saved(unit) if n == storage)
        parts = [part.name for part in stored_parts(storage, self.fates[site])]
        if rebuilt:
            parts.append(f"{storage}#r")
        self.w.add(
            Action(
                kind=Kind.JOIN,
                stream=COMPUTE,
                part=unit.prefix,
                op=storage,
                reads=tuple(parts),
                allocs=(Alloc(storage, nbytes),),
                nbytes=nbytes,
            )
        )

    # -- gradients ----------------------------------------------------------------------------

    def _backward_op(self, unit: Unit, op: Op) -> None:
        w, chunk, system = self.w, self.chunk, self.chunk.problem.system
        saved = [self._ensure(unit, name) for name in op.saves]
        outputs = [chunk.storage(unit, n) for n in op.outputs]
        incoming = [self.grads[o] for o in dict.fromkeys(outputs) if o in self.grads]
        for name in op.alias_inputs:
            self.grads[chunk.storage(unit, name)] = incoming[0]
        if not op.backward_input and not op.backward_weight:
            return
        overlap = system.tp_overlap in ("backward", "gemm")
        if op.grad_gather is not None:
            full = f"d:{unit.prefix}.{op.name}.full"
            size = op.grad_gather.nbytes if op.grad_gather.group == "tp" else 0
            allocs = [Alloc(full, size)] if size else []
            w.wait(COMPUTE, w.collective(op.grad_gather, unit.prefix, op.name, incoming, allocs))
            incoming = [full] if size else incoming
        pending, regathered = self._regather(unit, op, saved, overlap)
        self._kernels(unit, op, [*incoming, *saved], regathered, pending, overlap)

    def _regather(
        self, unit: Unit, op: Op, saved: list[str], overlap: bool
    ) -> tuple[str, list[str]]:
        """Gather the saved input again; pending event if it may run beside the input gradient."""
        if op.regather is None:
            return "", []
        full = f"{unit.prefix}.{op.name}.full"
        allocs = [Alloc(full, op.gathered_bytes)] if op.gathered_bytes else []
        event = self.w.collective(op.regather, unit.prefix, op.name, saved, allocs)
        beside = (overlap and op.has_weight) or op.regather.kind == "ring"
        if not beside:
            self.w.wait(COMPUTE, event)
            event = ""
        return event, [full] if allocs else []

    def _kernels(
        self,
        unit: Unit,
        op: Op,
        reads: list[str],
        regathered: list[str],
        pending: str,
        overlap: bool,
    ) -> None:
        """Input-gradient kernels, gradient reduction, weight-gradient kernels."""
        w = self.w
        reduced = op.grad_reduce
        needs_full = [] if op.has_weight else regathered
        if op.backward_input:
            added_into = self._accumulated(unit, op)
            allocs, final = self._gradients(unit, op, reduced is not None)
            w.compute(
                Kind.BACKWARD_INPUT,
                unit.prefix,
                op,
                [*reads, *needs_full, *added_into],
                allocs,
                beside=op.regather.group if pending and op.regather else "",
            )
            if pending:
                w.wait(COMPUTE, pending)
            if reduced is not None:
                sources = [a.name for a in allocs if not final or a.name.endswith(".part")]
                pending = w.collective(reduced, unit.prefix, op.name, sources, final)
                if not (overlap and op.has_weight):
                    w.wait(COMPUTE, pending)
                    pending = ""
            else:
                pending = ""
        if op.backward_weight:
            beside = "tp" if pending else ""
            w.compute(
                Kind.BACKWARD_WEIGHT, unit.prefix, op, [*reads, *regathered], [], beside=beside
            )
        if pending:
            w.wait(COMPUTE, pending)

    def _accumulated(self, unit: Unit, op: Op) -> list[str]:
        """Gradients this operator adds into (residual branches): read and written in place."""
        names = [self.chunk.storage(unit, name) for name in op.inputs]
        return [self.grads[n] for n in names if n in self.grads]

    def _gradients(self, unit: Unit, op: Op, reduced: bool) -> tuple[list[Alloc], list[Alloc]]:
        """Storages of the input gradients: (what the kernel writes, what the collective leaves)."""
        tensors = unit.table.activations
        fresh: list[Alloc] = []
        for name in op.inputs:
            storage = self.chunk.storage(unit, name)
            if storage not in self.grads and name in tensors and tensors[name].differentiable:
                if name in op.alias_inputs:
                    continue
                self.grads[storage] = f"d:{storage}"
                fresh.append(Alloc(f"d:{storage}", tensors[name].nbytes))
        if not reduced or op.grad_reduce is None:
            return fresh, []
        if op.grad_reduce.kind == "reduce_scatter":
            part = Alloc(f"d:{unit.prefix}.{op.name}.part", op.grad_reduce.nbytes)
            direct = [a for a in fresh if a.name.endswith(".q")]  # the query is never gathered
            return [part, *direct], [a for a in fresh if a not in direct]
        return fresh, []


def emit_copies_in(
    w: BlockWriter, prefix: str, coming: list[tuple[str, int]], event: str
) -> str:
    """H2D actions of the given storages; the last one records `event`."""
    for position, (name, nbytes) in enumerate(coming):
        w.add(
            Action(
                kind=Kind.H2D,
                stream="h2d",
                part=prefix,
                op=name,
                reads=(name + HOST,),
                allocs=(Alloc(name, nbytes),),
                nbytes=nbytes,
                event=event if position == len(coming) - 1 else "",
            )
        )
    return event
