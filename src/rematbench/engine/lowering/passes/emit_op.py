"""Writes an operator's forward or recomputation, and copies of storages."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from rematbench.costs.operators.ops import Comm, Op
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps, Unit, bytes_of
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.program.action import COMPUTE, WHOLE, Alloc, Kind, Rows
from rematbench.engine.program.storage import NO_PART, Event, Role, Slot, Storage, storage_of
from rematbench.inputs.precision import FP32

Storages = Sequence[tuple[Storage, int]]

OPERANDS, GRADIENTS = 3, 2
"""The numbers of largest elements that TransformerEngine tracks for each matrix product: in a
forward those of input, weight and output; in a backward those of the gradients of output and input
(pytorch/quantization.py)."""


class Names(NamedTuple):
    """The storages of an operator's activations. `reads`: the inputs; `writes`: outputs to
    allocate; `slices`: existing storages of which the operator writes a slice. `rows`, `piece`: the
    marks of the storages that its collectives use. `columns`: the share of output columns to
    compute, below 1 if only some of several separate linears run. `made`: allocations of
    `writes`."""

    reads: dict[str, Storage]
    writes: dict[str, Storage]
    slices: dict[str, Storage]
    rows: str = ""
    piece: int | None = None
    columns: float = 1.0
    made: Sequence[Alloc] = ()

    def between(self, unit: Unit, op: Op, role: Role) -> Storage:
        """Return the storage between an operator's kernels and its gather or reduction."""
        return storage_of(unit.prefix, op.name, role, self.rows, self.piece)


def emit_op(
    w: BlockWriter,
    chunk: ChunkOps,
    unit: Unit,
    op: Op,
    kind: Kind,
    names: Names,
    rows: Rows = WHOLE,
) -> None:
    """Emit an operator's gather, kernels and reduction. With GEMM overlap and in ring attention,
    the collectives run during the kernels, and compute waits for them afterwards."""
    if op.moves:
        _exchange(w, chunk, unit, op, kind, names, rows)
        return
    fraction = rows.fraction
    gemm_overlap = chunk.problem.tp_overlap == "gemm"
    ring = op.gather is not None and op.gather.kind == "ring"
    by_tp = op.gather is None or op.gather.group == "tp"
    overlaps = ring or (gemm_overlap and by_tp and op.name != "attention")
    held = op.holds if kind is Kind.FORWARD else ()
    sources = [names.reads[name] for name in (*op.inputs, *held)]
    pending: Event | None = None
    stream = ""
    emit_amax(w, unit, op.name, op.amax, sources)
    if op.gather is not None:
        full = names.between(unit, op, Role.GATHERED)
        allocs = [Alloc(full, int(op.gathered_bytes * fraction))] if op.gathered_bytes else []
        pending = w.collective(op.gather, unit.prefix, op.name, sources, allocs, rows)
        sources = [*sources, full] if op.name == "attention" else [full]
        if overlaps:
            w.wait(COMPUTE, w.mark_begin(len(w.actions) - 1))
            stream = op.gather.group
        else:
            w.wait(COMPUTE, pending)
            pending = None
    if op.reduce is not None and overlaps and op.has_weight:
        stream = op.reduce.group
    made = [
        Alloc(names.writes[name], bytes_of(chunk, unit, name, fraction))
        for name in op.outputs
        if name in names.writes
    ]
    names = names._replace(made=made)
    index, reduced = _kernels(w, unit, op, kind, names, rows, sources, stream)
    if pending:
        w.wait(COMPUTE, pending)
    if op.reduce is not None and reduced != ([], []):  # Kept outputs need no reduction.
        after = w.mark_begin(index) if overlaps and op.has_weight else None
        done = w.collective(op.reduce, unit.prefix, op.name, *reduced, rows, after=after)
        w.wait(COMPUTE, done)


def _exchange(
    w: BlockWriter, chunk: ChunkOps, unit: Unit, op: Op, kind: Kind, names: Names, rows: Rows
) -> None:
    """Emit an all-to-all without kernels, for the tensors that `names` writes.  Compute waits for
    one that runs again (NVIDIA/Megatron-LM pull request 5869: exposed by design)."""
    assert op.reduce is not None
    tensors = unit.table.activations
    reads, slices, allocs, moved = [], [], [], 0
    for source, out in zip(op.inputs, op.outputs, strict=True):
        if out in names.writes:
            nbytes = bytes_of(chunk, unit, out, rows.fraction)
            allocs.append(Alloc(names.writes[out], nbytes))
        elif out in names.slices:
            slices.append(names.slices[out])
        else:
            continue
        reads.append(names.reads[source])
        moved += max(tensors[source].nbytes, tensors[out].nbytes)
    if not reads:  # All outputs were kept, so there is nothing to recompute.
        return
    comm = Comm(op.reduce.kind, op.reduce.group, moved)
    reads += slices
    done = w.collective(comm, unit.prefix, op.name, reads, allocs, rows)
    if op.exchanges and kind is not Kind.RECOMPUTE:
        w.run_beside(unit.variant)
    w.wait(COMPUTE, done)


def _kernels(
    w: BlockWriter,
    unit: Unit,
    op: Op,
    kind: Kind,
    names: Names,
    rows: Rows,
    sources: list[Storage],
    stream: str,
) -> tuple[int, tuple[list[Storage], list[Alloc]]]:
    """Emit the compute action; return its index and the (reads, allocs) of its reduction."""
    fraction, allocs = rows.fraction, [*names.made]
    slices = [names.slices[name] for name in op.outputs if name in names.slices]
    unreduced = op.reduce is not None and op.unreduced_bytes > 0
    if unreduced:
        partial = names.between(unit, op, Role.PARTIAL)
        made = [Alloc(partial, int(op.unreduced_bytes * fraction))]
        reads, reduced = sources, ([partial, *slices], allocs)
    else:
        made, reads = allocs, [*sources, *slices]
        reduced = ([*(a.storage for a in allocs), *slices], [])
    if names.columns != 1.0:
        rows = replace(rows, columns=names.columns)
    where = unit.prefix, unit.variant
    index = w.compute(kind, *where, op, reads, made, overlaps=stream, rows=rows)
    return index, reduced


def emit_amax(w: BlockWriter, unit: Unit, op: str, comm: Comm | None, reads: list[Storage]) -> None:
    """Before a tensor is quantised, reduce its largest element over ranks that hold parts of it."""
    if comm is not None:
        w.wait(COMPUTE, w.collective(comm, unit.prefix, op, reads, []))


def emit_amaxes(w: BlockWriter, chunk: ChunkOps, numbers: int) -> None:
    """After a pass, reduce `numbers` largest elements of each matrix product over the stage's ranks
    (TransformerEngine 2.x, pytorch/quantization.py: reduce_and_update_fp8_tensors, at the end of
    the outermost autocast, which Megatron-core opens for a chunk in its recipe `delayed`; its group
    spans tensor, context and data parallelism)."""
    recipe, lay = chunk.problem.cost.recipe, chunk.problem.layout
    products = sum(unit.table.products for unit in chunk.units)
    if recipe and recipe.reduces == "history" and products and lay.gpus > lay.pp:
        comm = Comm("amax", "stage", FP32 * numbers * products)
        w.wait(COMPUTE, w.collective(comm, NO_PART, "amaxes", [], []))


def emit_alloc(w: BlockWriter, storage: Storage, nbytes: int) -> None:
    """Allocate a tensor whose slices are written later."""
    w.move(Kind.ALLOC, storage, (), (Alloc(storage, nbytes),))


def emit_copies(
    w: BlockWriter, kind: Kind, storages: Storages, event: Event, slot: Slot | None = None
) -> Event:
    """Emit D2H or H2D copies of the storages. Copies to the device fill a staging slot or, without
    one, new memory. The last copy records `event`, which is also returned."""
    for storage, nbytes in storages:
        end = event if storage is storages[-1][0] else None
        source, made = storage, storage.on_host
        if kind is Kind.H2D:
            source, made = made, source
        allocs = (Alloc(made, nbytes, slot),)
        w.move(kind, storage, (source,), allocs, nbytes, stream=kind.value.lower(), event=end)
    return event
