"""Writes one operator's forward or recomputation, and the copies of lists of storages."""

from typing import NamedTuple

import msgspec

from rematbench.costs.operators.ops import Comm, Op
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps, Unit, piece_bytes
from rematbench.engine.lowering.blocks.writer import WHOLE, BlockWriter, Share
from rematbench.engine.program.action import COMPUTE, HOST, Action, Alloc, Kind, place
from rematbench.plan import PlanError

NOT_AGAIN = (
    "disable moe in recompute_modules, and full recomputation, when enabling "
    "overlap_moe_expert_parallel_comm"
)
"""Megatron-core's words (transformer_config.py) for a plan that sends experts' tokens again.  The
words on modules are from releases after 0.16.1; 0.16.1 itself skips the module's recomputation
without a word."""


class Names(NamedTuple):
    """The storages of an operator's activations.  `reads`: the inputs; `writes`: outputs to
    allocate; `slices`: existing storages of which the operator writes a slice.  `columns`: the
    share of output columns computed, less than 1 if some of several separate linears need not
    run."""

    reads: dict[str, str]
    writes: dict[str, str]
    slices: dict[str, str]
    tag: str = ""
    columns: float = 1.0


def emit_op(
    w: BlockWriter,
    chunk: ChunkOps,
    unit: Unit,
    op: Op,
    kind: Kind,
    names: Names,
    share: Share = WHOLE,
) -> None:
    """Emit an operator's gather, kernels and reduction.  With GEMM overlap, and in ring attention,
    the collectives overlap the kernels, and compute waits for them afterwards."""
    if op.exchanges:
        if kind is Kind.RECOMPUTE and chunk.problem.ep_overlaps:
            raise PlanError(f"ep_overlap does not allow {op.name} to be recomputed: {NOT_AGAIN}")
        _exchange(w, unit, op, names, share)
        return
    fraction = share.fraction
    gemm_overlap = chunk.problem.tp_overlap == "gemm"
    ring = op.gather is not None and op.gather.kind == "ring"
    by_tp = op.gather is None or op.gather.group == "tp"
    overlaps = ring or (gemm_overlap and by_tp and op.name != "attention")
    held = op.holds if kind is Kind.FORWARD else ()
    sources = [names.reads[name] for name in (*op.inputs, *held)]
    pending, stream = "", ""
    if op.gather is not None:
        full = f"{unit.prefix}.{op.name}.full{names.tag}"
        allocs = [Alloc(full, int(op.gathered_bytes * fraction))] if op.gathered_bytes else []
        pending = w.collective(op.gather, unit.prefix, op.name, sources, allocs, share)
        sources = [*sources, full] if op.name == "attention" else [full]
        if overlaps:
            w.wait(COMPUTE, w.mark_begin(len(w.actions) - 1))
            stream = op.gather.group
        else:
            w.wait(COMPUTE, pending)
            pending = ""
    if op.reduce is not None and overlaps and op.has_weight:
        stream = op.reduce.group
    index, reduced = _kernels(w, unit, op, kind, names, share, sources, stream)
    if pending:
        w.wait(COMPUTE, pending)
    if op.reduce is not None and reduced != ([], []):  # else the output was kept
        after = w.mark_begin(index) if overlaps and op.has_weight else ""
        done = w.collective(op.reduce, unit.prefix, op.name, *reduced, share, after=after)
        w.wait(COMPUTE, done)


def _exchange(w: BlockWriter, unit: Unit, op: Op, names: Names, share: Share) -> None:
    """Emit an all-to-all without kernels, only of the tensors that `names` writes."""
    assert op.reduce is not None
    tensors = unit.table.activations
    reads, slices, allocs, moved = [], [], [], 0
    for source, out in zip(op.inputs, op.outputs, strict=True):
        if out in names.writes:
            allocs.append(Alloc(names.writes[out], piece_bytes(tensors[out], share.fraction)))
        elif out in names.slices:
            slices.append(names.slices[out])
        else:
            continue
        reads.append(names.reads[source])
        moved += max(tensors[source].nbytes, tensors[out].nbytes)
    if not reads:  # all outputs are kept: nothing to recompute
        return
    comm = Comm(op.reduce.kind, op.reduce.group, moved)
    reads += slices
    done = w.collective(comm, unit.prefix, op.name, reads, allocs, share)
    w.run_beside(unit.variant)
    w.wait(COMPUTE, done)


def _kernels(
    w: BlockWriter,
    unit: Unit,
    op: Op,
    kind: Kind,
    names: Names,
    share: Share,
    sources: list[str],
    stream: str,
) -> tuple[int, tuple[list[str], list[Alloc]]]:
    """Emit the compute action; returns its index and the (reads, allocs) of its reduction."""
    tensors, fraction = unit.table.activations, share.fraction
    allocs = [
        Alloc(names.writes[name], piece_bytes(tensors[name], fraction))
        for name in op.outputs
        if name in names.writes
    ]
    slices = [names.slices[name] for name in op.outputs if name in names.slices]
    unreduced = op.reduce is not None and op.unreduced_bytes > 0
    if unreduced:
        partial = Alloc(
            f"{unit.prefix}.{op.name}.part{names.tag}", int(op.unreduced_bytes * fraction)
        )
        made, reads, reduced = [partial], sources, ([partial.name, *slices], allocs)
    else:
        made, reads = allocs, [*sources, *slices]
        reduced = ([*(a.name for a in allocs), *slices], [])
    index = w.compute(
        kind,
        unit.prefix,
        op,
        reads,
        made,
        variant=unit.variant,
        overlaps=stream,
        share=share,
    )
    if names.columns != 1.0:
        w.actions[index] = msgspec.structs.replace(w.actions[index], columns=names.columns)
    return index, reduced


def emit_alloc(w: BlockWriter, storage: str, nbytes: int) -> None:
    """Allocate a tensor that is then written in slices."""
    part, tensor = place(storage)
    w.add(
        Action(
            kind=Kind.ALLOC,
            stream=COMPUTE,
            part=part,
            op=tensor,
            allocs=(Alloc(storage, nbytes),),
        )
    )


def emit_copies_out(w: BlockWriter, storages: list[tuple[str, int]], event: str) -> str:
    """Emit D2H copies of the storages; the last copy records `event`."""
    for position, (name, nbytes) in enumerate(storages):
        part, tensor = place(name)
        w.add(
            Action(
                kind=Kind.D2H,
                stream="d2h",
                part=part,
                op=tensor,
                reads=(name,),
                allocs=(Alloc(name + HOST, nbytes),),
                nbytes=nbytes,
                event=event if position == len(storages) - 1 else "",
            )
        )
    return event


def emit_copies_in(
    w: BlockWriter, storages: list[tuple[str, int]], event: str, slot: str = ""
) -> str:
    """Emit H2D copies of the storages into a staging slot, or into fresh memory if the slot is "".
    The last copy records `event`, which is returned."""
    for position, (name, nbytes) in enumerate(storages):
        part, tensor = place(name)
        w.add(
            Action(
                kind=Kind.H2D,
                stream="h2d",
                part=part,
                op=tensor,
                reads=(name + HOST,),
                allocs=(Alloc(name, nbytes, slot),),
                nbytes=nbytes,
                event=event if position == len(storages) - 1 else "",
            )
        )
    return event
