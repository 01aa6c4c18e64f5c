"""A static memory plan of a rank's program, in two levels, after MEMO (arXiv 2407.12117, 4.3).

Level 1 packs the tensors that exist only inside one layer's forward or one layer's backward (equal
layers are solved once).  Level 2 replaces each packing by one pseudo block of its peak and packs
the blocks with all longer-lived tensors: skeletal activations, embedding, head, gradients.  The
result is one allocation without fragmentation, to compare with the segments of a caching allocator.
"""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.program import RankProgram
from rematbench.engine.program.storage import HOST, Slot, Storage
from rematbench.solve.packing import Tensor, live_peak, pack

KERNELS = frozenset((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE))
MAX_TENSORS = 50_000
BEST_FIT_TENSORS = 3_000
"""The number of tensors that best fit places within a tenth of a second."""
Key = tuple[Storage, int, int]


class Lifetime(NamedTuple):
    """A tensor's bytes and lifetime on the clock of issued actions.  A segment is the contiguous
    actions of one unit in a block: the tensor is allocated in `first_segment` and freed in
    `last_segment`."""

    tensor: Tensor
    first_segment: int
    last_segment: int


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """Bytes of one allocation for all activations of a rank.  `peak_bytes` is the smaller result of
    the two levels and of best fit over all tensors; `lower_bound_bytes` is the peak of live
    bytes."""

    peak_bytes: int
    lower_bound_bytes: int


def memory_plan(rank: RankProgram) -> MemoryPlan:
    """The plan of a rank's activations; staging slots are tensors that exist throughout.
    ValueError for more than MAX_TENSORS tensors."""
    lives = list(lifetimes(rank))
    if len(lives) > MAX_TENSORS:
        raise ValueError(
            f"{len(lives)} tensors to place, but the limit is {MAX_TENSORS}: reduce the number "
            "of micro-batches"
        )
    local: dict[int, list[Tensor]] = {}
    upper: list[Tensor] = []
    for life in lives:
        if life.first_segment == life.last_segment:
            local.setdefault(life.first_segment, []).append(life.tensor)
        else:
            upper.append(life.tensor)
    for tensors in local.values():
        begin, end = min(t.start for t in tensors), max(t.end for t in tensors)
        moved = tuple(Tensor(t.nbytes, t.start - begin, t.end - begin) for t in tensors)
        upper.append(Tensor(pack(moved).peak_bytes, begin, end))
    two_level = pack(tuple(upper)).peak_bytes
    bound = live_peak(life.tensor for life in lives)
    flat = two_level if two_level == bound else pack(tuple(x.tensor for x in lives), 0).peak_bytes
    return MemoryPlan(peak_bytes=min(two_level, flat), lower_bound_bytes=bound)


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
    return pack(tuple(life.tensor for life in lifetimes(rank)), 0).peak_bytes


def lifetimes(rank: RankProgram) -> Iterator[Lifetime]:
    """Every device tensor (and kernel scratch) of a rank's program; slots exist throughout."""
    alive: dict[Key, tuple[int, int, int]] = {}
    slots: dict[Slot, dict[tuple[object, ...], int]] = {}
    clock = 0
    for segment, action, micro_batch, chunk in _segments(rank):
        for alloc in action.allocs:
            if alloc.slot:
                who = (micro_batch, chunk, alloc.tenant, segment)
                held = slots.setdefault(alloc.slot, {})
                held[who] = held.get(who, 0) + alloc.nbytes
            elif alloc.storage.place != HOST:
                alive[(alloc.storage, micro_batch, chunk)] = (alloc.nbytes, clock, segment)
        if action.scratch:
            yield Lifetime(Tensor(action.scratch, clock, clock + 1), segment, segment)
        clock += 1
        for freed in action.frees:
            birth = alive.pop((freed, micro_batch, chunk), None)
            if birth is not None:
                nbytes, start, first_segment = birth
                yield Lifetime(Tensor(nbytes, start, clock), first_segment, segment)
    for held in slots.values():
        yield Lifetime(Tensor(max(held.values()), 0, clock), -1, segment)


def _segments(rank: RankProgram) -> Iterator[tuple[int, Action, int, int]]:
    """(segment, action, micro-batch, chunk) of every action; a segment is a run of contiguous
    kernels of one unit."""
    segment = 0
    for step in rank.steps:
        segment, part = segment + 1, ""
        for action in rank.blocks[step.block].actions:
            if action.kind in KERNELS and action.part != part:
                segment, part = segment + bool(part), action.part
            yield segment, action, step.micro_batch, step.chunk
