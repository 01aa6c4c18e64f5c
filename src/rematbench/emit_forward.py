"""Write a chunk's forward block: operators, collectives, parameter gathers, splits, layer copies."""

from rematbench.action import HOST, Action, Alloc, Kind
from rematbench.chunk_ops import ChunkOps, Unit, stored_parts
from rematbench.emit_states import ParameterGatherer
from rematbench.fates import Resolved, Site
from rematbench.ops import Op
from rematbench.plan import Transfers
from rematbench.program import Block
from rematbench.writer import COMPUTE, BlockWriter

Fates = dict[Site, Resolved]


def emit_op(
    w: BlockWriter,
    chunk: ChunkOps,
    unit: Unit,
    op: Op,
    kind: Kind,
    reads: dict[str, str],
    writes: dict[str, str],
    fraction: float = 1.0,
) -> None:
    """One operator forward (or recompute): gather, kernels, reduce.

    `reads` and `writes` map activations to storage names.  With GEMM overlap the collectives run
    beside the kernels and are only waited for afterwards.
    """
    gemm_overlap = chunk.problem.system.tp_overlap == "gemm"
    beside = _ring(op) or (gemm_overlap and op.name != "attention")
    tag = ".r" if kind is Kind.RECOMPUTE else ""
    sources = [reads[name] for name in op.inputs]
    pending, streams = "", ""
    if op.gather is not None:
        full = f"{unit.prefix}.{op.name}.full{tag}"
        allocs = [Alloc(full, _part(op.gathered_bytes, fraction))] if op.gathered_bytes else []
        pending = w.collective(op.gather, unit.prefix, op.name, sources, allocs, fraction=fraction)
        sources = [*sources, full] if op.name == "attention" else [full]
        if beside:
            w.wait(COMPUTE, w.mark_begin(len(w.actions) - 1))
            streams = op.gather.group
        else:
            w.wait(COMPUTE, pending)
            pending = ""
    partial = f"{unit.prefix}.{op.name}.part{tag}"
    allocs = _outputs(unit, op, writes, fraction)
    unreduced = op.reduce is not None and op.unreduced_bytes > 0
    made = [Alloc(partial, _part(op.unreduced_bytes, fraction))] if unreduced else allocs
    if op.reduce is not None and beside and op.reduce.group == "tp":
        streams = "tp"
    index = w.compute(
        kind, unit.prefix, op, sources, made, fraction=fraction, beside=streams if beside else ""
    )
    if pending:
        w.wait(COMPUTE, pending)
    if op.reduce is not None:
        after = w.mark_begin(index) if beside and op.has_weight else ""
        done = w.collective(
            op.reduce,
            unit.prefix,
            op.name,
            [partial] if unreduced else [a.name for a in allocs],
            allocs if unreduced else [],
            after=after,
            fraction=fraction,
        )
        w.wait(COMPUTE, done)


def _ring(op: Op) -> bool:
    return op.gather is not None and op.gather.kind == "ring"


def _part(nbytes: int, fraction: float) -> int:
    return nbytes if fraction == 1.0 else int(nbytes * fraction)


def _outputs(unit: Unit, op: Op, writes: dict[str, str], fraction: float) -> list[Alloc]:
    tensors = unit.table.activations
    return [
        Alloc(writes[name], _rows_bytes(tensors[name].rows, tensors[name].row_bytes, fraction))
        for name in op.outputs
        if name in writes
    ]


def _rows_bytes(rows: int, row_bytes: int, fraction: float) -> int:
    return rows * row_bytes if fraction == 1.0 else int(rows * fraction + 1e-9) * row_bytes


class ForwardEmitter:
    """The forward block of one chunk under resolved fates."""

    def __init__(
        self,
        chunk: ChunkOps,
        fates: Fates,
        transfers: Transfers,
        gatherer: ParameterGatherer | None,
    ) -> None:
        self.chunk, self.fates, self.transfers, self.gatherer = chunk, fates, transfers, gatherer
        self.w = BlockWriter()
        self.survivors: set[str] = set()
        self.in_flight: list[tuple[str, tuple[str, ...]]] = []

    def block(self) -> Block:
        """F: from the chunk's input to its output, leaving what the backward needs."""
        chunk, w = self.chunk, self.w
        if not chunk.first:
            w.wait(COMPUTE, "recv_f")
        for position, unit in enumerate(chunk.units):
            if self.gatherer:
                self.gatherer.before(w, chunk.units, position)
            for op in unit.table.ops:
                names = {n: chunk.storage(unit, n) for n in (*op.inputs, *op.outputs)}
                emit_op(w, chunk, unit, op, Kind.FORWARD, names, names)
            self._store(unit)
            if self.gatherer:
                self.gatherer.after(w, unit)
        self._drain(0)
        if not chunk.last:
            self.survivors.add(chunk.output_name)
        w.add(Action(kind=Kind.EVENT, stream=COMPUTE, event="f_end"))
        arrivals = set() if chunk.first else {chunk.input_name}
        if self.gatherer:
            self.survivors |= self.gatherer.survivors
        return Block("F", w.finish("F", self.survivors, arrivals))

    def _store(self, unit: Unit) -> None:
        """Split mixed tensors; with layer granularity, start their copies."""
        leaving: list[tuple[str, int]] = []
        for _, storage, site in self.chunk.saved(unit):
            fate = self.fates[site]
            parts = stored_parts(storage, fate)
            self.survivors.update(part.name for part in parts)
            if fate.mixed:
                self._split(unit, storage, fate)
            leaving += [(part.name, part.nbytes) for part in parts if part.offload]
        if leaving and self.transfers.granularity == "layer":
            self._copy_out(unit, leaving)

    def _split(self, unit: Unit, storage: str, fate: Resolved) -> None:
        allocs = tuple(Alloc(part.name, part.nbytes) for part in stored_parts(storage, fate))
        moved = sum(alloc.nbytes for alloc in allocs)
        self.w.add(
            Action(
                kind=Kind.SPLIT,
                stream=COMPUTE,
                part=unit.prefix,
                op=storage,
                reads=(storage,),
                allocs=allocs,
                nbytes=moved,
            )
        )

    def _copy_out(self, unit: Unit, leaving: list[tuple[str, int]]) -> None:
        self._drain(self.transfers.release_lag)
        self.w.wait("d2h", self.w.mark(COMPUTE))
        event = emit_copies_out(self.w, unit.prefix, leaving, self.w.new_event())
        names = tuple(name for name, _ in leaving)
        self.survivors.difference_update(names)
        self.survivors.update(name + HOST for name in names)
        self.in_flight.append((event, names))

    def _drain(self, leave: int) -> None:
        """Free the device copies of all but the last `leave` layers in flight."""
        while len(self.in_flight) > leave:
            event, names = self.in_flight.pop(0)
            self.w.wait(COMPUTE, event)
            self.w.add(Action(kind=Kind.FREE, stream=COMPUTE, frees=names))


def emit_copies_out(
    w: BlockWriter, prefix: str, leaving: list[tuple[str, int]], event: str
) -> str:
    """D2H actions of the given storages; the last one records `event`."""
    for position, (name, nbytes) in enumerate(leaving):
        w.add(
            Action(
                kind=Kind.D2H,
                stream="d2h",
                part=prefix,
                op=name,
                reads=(name,),
                allocs=(Alloc(name + HOST, nbytes),),
                nbytes=nbytes,
                event=event if position == len(leaving) - 1 else "",
            )
        )
    return event

