"""Planned addresses of a rank's activations: one allocation without fragmentation, after MEMO
(arXiv 2407.12117, 4.3), to compare with the segments of a caching allocator."""

from collections.abc import Iterator

from rematbench.engine.program.ledger import slot_bytes
from rematbench.engine.program.program import RankProgram
from rematbench.engine.program.storage import HOST, Storage
from rematbench.solve.packing import Tensor, best_fit, packed_bytes

BEST_FIT_TENSORS = 3_000
"""The number of tensors that best fit places within a tenth of a second."""


# Why: docs/decisions/solve.md, When do planned addresses decide whether a plan fits?
def is_placeable(rank: RankProgram) -> bool:
    """Whether a rank has few enough tensors for best fit to place them quickly."""
    made = sum(
        runs * n * (sum(a.storage.place != HOST for a in action.allocs) + bool(action.scratch))
        for block, runs in zip(rank.blocks, rank.runs, strict=True)
        for action, n in block.counted()
    )
    return made <= BEST_FIT_TENSORS


def planned_peak(rank: RankProgram) -> int:
    """Bytes of one allocation for all activations of a rank, placed by best fit; 0 if there are too
    many tensors (the caller then uses the bytes of the allocator)."""
    if not is_placeable(rank):
        return 0
    tensors = list(lifetimes(rank))
    return packed_bytes(tensors, best_fit(tensors))


def lifetimes(rank: RankProgram) -> Iterator[Tensor]:
    """Every device tensor, and the scratch of every kernel, of a rank's program, on the clock of
    its actions.  Staging slots are alive throughout."""
    alive: dict[tuple[Storage, int, int], tuple[int, int]] = {}  # bytes and start
    clock = 0
    for action, micro_batch, chunk in rank.actions():
        for alloc in action.allocs:
            if not alloc.slot and alloc.storage.place != HOST:
                alive[(alloc.storage, micro_batch, chunk)] = (alloc.nbytes, clock)
        if action.scratch:
            yield Tensor(action.scratch, clock, clock + 1)
        clock += 1
        for freed in action.frees:
            if birth := alive.pop((freed, micro_batch, chunk), None):
                yield Tensor(*birth, clock)
    for nbytes in slot_bytes(rank).values():
        yield Tensor(nbytes, 0, clock)
