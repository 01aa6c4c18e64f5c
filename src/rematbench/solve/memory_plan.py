"""A static memory plan of a rank's program, in two levels, after MEMO (arXiv 2407.12117, 4.3).

Level 1 packs the tensors that are born and die inside one layer's forward or one layer's backward
(equal layers are solved once). Level 2 replaces each such packing by one pseudo block of its peak
and packs the blocks with all tensors that live longer: skeletal activations, embedding, head,
gradients. The result is one allocation without fragmentation, to compare with a caching allocator's
segments.
"""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from rematbench.engine.program.action import HOST, Action, Kind, tenant
from rematbench.engine.program.program import RankProgram
from rematbench.solve.packing import Tensor, live_peak, pack

KERNELS = frozenset((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE))
MAX_TENSORS = 50_000
FEW_TENSORS = 3_000
"""The number of tensors that best fit places within a tenth of a second."""
Key = tuple[str, int, int]


class Life(NamedTuple):
    """A tensor's bytes and lifetime on the clock of issued actions, and the segments of its ends. A
    segment is one unit's stretch of a block; the tensor is born in `born_in` and dies in
    `dies_in`."""

    tensor: Tensor
    born_in: int
    dies_in: int


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """Bytes of one allocation for all activations of a rank. `peak_bytes` is the better of two
    levels and of best fit over all tensors at once; `lower_bound_bytes` are the live bytes."""

    peak_bytes: int
    lower_bound_bytes: int


def memory_plan(rank: RankProgram) -> MemoryPlan:
    """The plan of a rank's activations; staging slots are tensors that live through the program."""
    lives = list(lifetimes(rank))
    if len(lives) > MAX_TENSORS:
        raise ValueError(
            f"{len(lives)} tensors to plan, at most {MAX_TENSORS}: fewer micro-batches"
        )
    local: dict[int, list[Tensor]] = {}
    upper: list[Tensor] = []
    for life in lives:
        if life.born_in == life.dies_in:
            local.setdefault(life.born_in, []).append(life.tensor)
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


def placed(rank: RankProgram) -> bool:
    """Whether a rank has so few tensors that best fit places them quickly."""
    made = sum(
        runs * n * (sum(not a.name.endswith(HOST) for a in action.allocs) + bool(action.scratch))
        for block, runs in zip(rank.blocks, rank.runs, strict=True)
        for action, n in block.counted()
    )
    return made <= FEW_TENSORS


def planned_peak(rank: RankProgram) -> int:
    """Bytes of one allocation for all activations of a rank, placed by best fit. 0 where they are
    not placed; the caller then takes the bytes of the allocator."""
    if not placed(rank):
        return 0
    return pack(tuple(life.tensor for life in lifetimes(rank)), 0).peak_bytes


def lifetimes(rank: RankProgram) -> Iterator[Life]:
    """Every device tensor (and kernel scratch) of a rank's program; pools live throughout."""
    alive: dict[Key, tuple[int, int, int]] = {}
    slots: dict[str, dict[tuple[object, ...], int]] = {}
    clock = 0
    for segment, action, micro_batch, chunk in _segments(rank):
        for alloc in action.allocs:
            if alloc.slot:
                who = (micro_batch, chunk, tenant(alloc.name, alloc.slot), segment)
                held = slots.setdefault(alloc.slot, {})
                held[who] = held.get(who, 0) + alloc.nbytes
            elif not alloc.name.endswith(HOST):
                alive[(alloc.name, micro_batch, chunk)] = (alloc.nbytes, clock, segment)
        if action.scratch:
            yield Life(Tensor(action.scratch, clock, clock + 1), segment, segment)
        clock += 1
        for name in action.frees:
            birth = alive.pop((name, micro_batch, chunk), None)
            if birth is not None:
                nbytes, start, born_in = birth
                yield Life(Tensor(nbytes, start, clock), born_in, segment)
    for held in slots.values():
        yield Life(Tensor(max(held.values()), 0, clock), -1, segment)


def _segments(rank: RankProgram) -> Iterator[tuple[int, Action, int, int]]:
    """Actions with micro-batch, chunk and segment: a unit's uninterrupted stretch of kernels."""
    segment = 0
    for step in rank.steps:
        segment, part = segment + 1, ""
        for action in rank.blocks[step.block].actions:
            if action.kind in KERNELS and action.part != part:
                segment, part = segment + bool(part), action.part
            yield segment, action, step.micro_batch, step.chunk
