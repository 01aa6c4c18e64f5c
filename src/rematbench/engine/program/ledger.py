"""Two ledgers of activation bytes: in issue order, as an allocator sees them, and over simulated
time.

The issue-order ledger needs no costs. Each block has net bytes and a peak, so the ledger of a step
is a walk over blocks. Tensors in staging slots are counted once, with their pool.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from rematbench.engine.program.action import Action, Alloc, Kind
from rematbench.engine.program.profile import Profile, program_profiles
from rematbench.engine.program.program import Part, Program, RankProgram
from rematbench.engine.program.storage import HOST, Slot, Storage
from rematbench.engine.program.template import LayerPeriods


class RankLedger(Struct, frozen=True, kw_only=True):
    """Peaks of a rank's activation bytes, the index of the step with the device peak, and the bytes
    left at the end. `pinned` bytes are those of the blocks that torch pins for the host bytes."""

    device_peak_bytes: int
    host_peak_bytes: int
    pinned_peak_bytes: int
    peak_step: int
    device_left_bytes: int
    host_left_bytes: int


class Interval(NamedTuple):
    """An action on the timeline, in seconds from the start of the step."""

    rank: int
    stream: str
    start_s: float
    end_s: float
    block: str
    action: Action
    micro_batch: int
    chunk: int


class Live(NamedTuple):
    """A live storage (None: the scratch of an action), its micro-batch and chunk, and its bytes."""

    storage: Storage | None
    micro_batch: int
    chunk: int
    nbytes: int


def pool_bytes(rank: RankProgram) -> int:
    """Return the bytes of a rank's staging pools: each slot is as large as its largest tenant."""
    slots: dict[Slot | None, int] = {}
    for block in rank.blocks:
        here: dict[tuple[Slot | None, str], int] = {}
        for alloc, pieces, layers in _slotted(block.parts, 1, 1):
            who = alloc.tenant
            here.setdefault((alloc.slot, who), 0)
            here[alloc.slot, who] += alloc.nbytes * pieces * (1 if who else layers)
        for (slot, _), nbytes in here.items():
            slots[slot] = max(slots.get(slot, 0), nbytes)
    return sum(slots.values())


def _slotted(parts: Sequence[Part], pieces: int, layers: int) -> Iterator[tuple[Alloc, int, int]]:
    """Yield (allocation, pieces, layers) for every allocation in a staging slot: how often it
    occurs in a layer, and in how many layers, each of which is another tenant."""
    for part in parts:
        if part.periods is None:
            slotted = (alloc for action in part.written for alloc in action.allocs if alloc.slot)
            yield from ((alloc, pieces, layers) for alloc in slotted)
        elif isinstance(part.periods.naming, LayerPeriods):
            yield from _slotted(part.inside, pieces, layers * part.times)
        else:
            yield from _slotted(part.inside, pieces * part.times, layers)


# Why: docs/decisions/engine.md, Is there a closed formula of peak memory for every method?
def issue_order(program: Program) -> tuple[RankLedger, ...]:
    """Return the peaks of every rank, with all actions applied in issue order."""
    tables = program_profiles(program)
    return tuple(_walk(r, t) for r, t in zip(program.ranks, tables, strict=True))


def _walk(rank: RankProgram, profiles: Sequence[Profile]) -> RankLedger:
    if not rank.steps:  # The rank was not lowered.
        return RankLedger(**dict.fromkeys(RankLedger.__struct_fields__, 0))
    sizes = list(chain.from_iterable(profiles))
    highest = max(map(abs, sizes)) * (len(rank.steps) + 2)  # No sum below is larger.
    kind = np.int64 if highest < np.iinfo(np.int64).max else object
    table = np.fromiter(sizes, kind, len(sizes))
    by_step = table.reshape(-1, len(Profile._fields)).T.take(rank.block_of_step, axis=1)
    nets, highs = by_step[0::2], by_step[1::2]  # (device, host, pinned) by steps
    levels = nets.cumsum(axis=1)
    tops = levels - nets + highs
    device_left, host_left, _ = levels[:, -1].tolist()
    device_peak, host_peak, pinned_peak = tops.max(axis=1, initial=0).tolist()
    return RankLedger(
        device_peak_bytes=device_peak,
        host_peak_bytes=host_peak,
        pinned_peak_bytes=pinned_peak,
        peak_step=int(tops[0].argmax()),
        device_left_bytes=device_left,
        host_left_bytes=host_left,
    )


def fresh_peak(rank: RankProgram) -> int:
    """Return the peak bytes of a rank's activations and gradients together, for a step of one
    micro-batch whose backward allocates the gradients of each unit."""
    units = rank.late.units if rank.late else {}
    made = {unit: sum(map(sum, late.gradients.values())) for unit, late in units.items()}
    best = live = gradients = 0
    sizes: dict[Storage, int] = {}
    for step in rank.steps:
        for action in rank.blocks[step.block].actions:
            if action.kind is Kind.BACKWARD_WEIGHT:
                gradients += made.pop((step.chunk, action.part), 0)
            elif action.kind is Kind.OPTIMIZER:  # Units without weight kernels have gradients, too.
                gradients, made = gradients + sum(made.values()), {}
            for alloc in action.allocs:
                if alloc.storage.place != HOST and not alloc.slot:
                    sizes[alloc.storage] = alloc.nbytes
                    live += alloc.nbytes
            best = max(best, live + action.scratch + gradients)
            live -= sum(sizes.pop(freed, 0) for freed in action.frees)
    return best


def live_bytes(actions: Iterable[tuple[Action, int, int]]) -> Iterable[tuple[int, int]]:
    """Yield (device, host) live bytes after each action in issue order, for comparison with an
    executed or traced program."""
    sizes: dict[tuple[Storage, int, int], int] = {}
    device = host = 0
    for action, micro_batch, chunk in actions:
        for alloc in action.allocs:
            nbytes = 0 if alloc.slot else alloc.nbytes
            sizes[(alloc.storage, micro_batch, chunk)] = nbytes
            device, host = _move(alloc.storage, nbytes, device, host)
        for freed in action.frees:
            device, host = _move(freed, -sizes.pop((freed, micro_batch, chunk)), device, host)
        yield device, host


def _move(storage: Storage, nbytes: int, device: int, host: int) -> tuple[int, int]:
    on_host = storage.place == HOST
    return (device, host + nbytes) if on_host else (device + nbytes, host)


def live_at_peak(rank: RankProgram, peak_step: int) -> tuple[Live, ...]:
    """Return all storages on the device at the rank's peak, for tables and stacked bars. The
    scratch of the action at the peak is an entry without a storage. Tensors in staging slots are
    left out, because the bytes of pools are counted separately."""
    live: dict[tuple[Storage | None, int, int], int] = {}
    best: dict[tuple[Storage | None, int, int], int] = {}
    best_bytes, total = -1, 0
    for position, step in enumerate(rank.steps[: peak_step + 1]):
        for action in rank.blocks[step.block].actions:
            for alloc in action.allocs:
                if alloc.storage.place != HOST and not alloc.slot:
                    live[(alloc.storage, step.micro_batch, step.chunk)] = alloc.nbytes
                    total += alloc.nbytes
            if position == peak_step and total + action.scratch > best_bytes:
                best_bytes = total + action.scratch
                best = dict(live)
                if action.scratch:
                    best[(None, step.micro_batch, step.chunk)] = action.scratch
            for freed in action.frees:
                total -= live.pop((freed, step.micro_batch, step.chunk), 0)
    return tuple(Live(*key, nbytes) for key, nbytes in best.items())


def timeline(intervals: Sequence[Interval], rank: int) -> list[tuple[float, int]]:
    """Return (seconds, live device bytes) of a rank over simulated time, for plots and for
    `active`. A storage lives from the start of its action until the stream reaches the free.
    Changes at equal times keep their issue order. Staging slots are counted with their pool."""
    sizes: dict[tuple[Storage, int, int], int] = {}
    deltas: list[tuple[float, int]] = []
    for item in intervals:
        if item.rank != rank:
            continue
        for alloc in item.action.allocs:
            if alloc.storage.place != HOST:
                nbytes = 0 if alloc.slot else alloc.nbytes
                sizes[(alloc.storage, item.micro_batch, item.chunk)] = nbytes
                deltas.append((item.start_s, nbytes))
        for freed in item.action.frees:
            nbytes = sizes.pop((freed, item.micro_batch, item.chunk), 0)
            deltas.append((item.end_s, -nbytes))
    total, points = 0, []
    for at, delta in sorted(deltas, key=lambda delta: delta[0]):
        total += delta
        points.append((at, total))
    return points
