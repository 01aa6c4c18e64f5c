"""The two ledgers of activation bytes: in issue order (as an allocator sees them), on the timeline.

The issue-order ledger needs no costs: each block has net bytes and a peak, so a step is a walk over
blocks.  Tensors in staging slots count once, with their pool.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from rematbench.cost.copies import pinned_block_bytes
from rematbench.program.action import HOST, Action, Alloc, tenant
from rematbench.program.program import Block, Part, Program, RankProgram
from rematbench.program.template import Layers
from rematbench.simulate.step import Interval


class Profile(NamedTuple):
    """The effect of one block: net bytes, and highest bytes above the level at entry, on the
    device, on the host, and in the pinned blocks that hold the host bytes."""

    device_net: int
    device_high: int
    host_net: int
    host_high: int
    pinned_net: int
    pinned_high: int

    def then(self, after: "Profile") -> "Profile":
        """The effect of this block with the actions of `after` behind it."""
        pairs = zip(self[::2], self[1::2], after[::2], after[1::2], strict=True)
        found = ((net + more, max(high, net + higher)) for net, high, more, higher in pairs)
        return Profile._make(chain.from_iterable(found))

    def times(self, count: int) -> "Profile":
        """The effect of `count` such blocks, one behind the other."""
        pairs = zip(self[::2], self[1::2], strict=True)
        found = ((count * net, max(high, (count - 1) * net + high)) for net, high in pairs)
        return Profile._make(chain.from_iterable(found))


class Outlive(NamedTuple):
    """`births`: bytes of the storages that a block leaves alive; `deaths`: names of storages alive
    before that the block frees."""

    births: dict[str, int]
    deaths: list[str]

    def named(self, name_of: Callable[[str], str]) -> "Outlive":
        """The same with other names."""
        births = {name_of(name): nbytes for name, nbytes in self.births.items()}
        return Outlive(births, [*map(name_of, self.deaths)])


class RankLedger(Struct, frozen=True, kw_only=True):
    """Peaks of one rank's activation bytes, the index of the step with the device peak, and the
    bytes left at the end.  `pinned` counts host bytes in the blocks that torch pins for them."""

    device_peak_bytes: int
    host_peak_bytes: int
    pinned_peak_bytes: int
    peak_step: int
    device_left_bytes: int
    host_left_bytes: int


SCRATCH = "scratch"
"""The name of bytes that are alive inside one action only."""


class Live(NamedTuple):
    """A live storage: its name, its (micro-batch, chunk), its bytes."""

    name: str
    micro_batch: int
    chunk: int
    nbytes: int


def pool_bytes(rank: RankProgram) -> int:
    """Bytes of a rank's staging pools: each slot is as large as its largest tenant."""
    slots: dict[str, int] = {}
    for block in rank.blocks:
        here: dict[tuple[str, str], int] = {}
        for alloc, pieces, layers in _slotted(block.parts, 1, 1):
            who = tenant(alloc.name, alloc.slot)
            here.setdefault((alloc.slot, who), 0)
            here[alloc.slot, who] += alloc.nbytes * pieces * (1 if who else layers)
        for (slot, _), nbytes in here.items():
            slots[slot] = max(slots.get(slot, 0), nbytes)
    return sum(slots.values())


def _slotted(parts: Sequence[Part], pieces: int, layers: int) -> Iterator[tuple[Alloc, int, int]]:
    """Allocations in staging slots, how often each occurs in a layer, and in how many layers (each
    of which is a tenant of its own)."""
    for part in parts:
        if part.periods is None:
            slotted = (alloc for action in part.written for alloc in action.allocs if alloc.slot)
            yield from ((alloc, pieces, layers) for alloc in slotted)
        elif isinstance(part.periods.of, Layers):
            yield from _slotted(part.inside, pieces, layers * part.times)
        else:
            yield from _slotted(part.inside, pieces * part.times, layers)


class LedgerError(ValueError):
    """An action frees a storage that is not alive."""


def program_profiles(program: Program) -> list[list[Profile]]:
    """The profiles of each rank's blocks.  The size of a tensor that a block only frees comes from
    the block that allocated it."""
    profiler = _Profiler()
    return [profiler.rank(rank) for rank in program.ranks]


class _Profiler:
    """Makes the profile of each block once: a block that ranks share has one profile."""

    def __init__(self) -> None:
        self.profiles: dict[int, Profile] = {}  # by identity of the block
        self.outlives: dict[int, Outlive] = {}

    def rank(self, rank: RankProgram) -> list[Profile]:
        """The profiles of a rank's blocks.  A block may free tensors that another block allocated
        for the same micro-batch and chunk: their sizes come from the steps of the first micro-batch
        and chunk that the block runs for."""
        left = {id(block): block for block in rank.blocks if id(block) not in self.profiles}
        for key, block in list(left.items()):
            sizes: dict[str, int] = {}
            try:
                self.profiles[key] = _profile(block, sizes)
            except LedgerError:  # it frees what another block allocated
                continue
            self.outlives[key] = Outlive(sizes, [])
            del left[key]
        first = {step[0]: step[1:] for step in rank.first_steps} if left else {}
        alive: dict[tuple[int, ...], dict[str, int]] = {
            where: {} for index, where in first.items() if id(rank.blocks[index]) in left
        }
        for step in rank.steps:
            if not left:
                break
            here = alive.get(step[1:])
            if here is None:
                continue
            block = rank.blocks[step[0]]
            if left.pop(id(block), None) is None:
                self._replay(block, here)
            else:
                self.profiles[id(block)] = _profile(block, here)
        return [self.profiles[id(block)] for block in rank.blocks]

    def _replay(self, block: Block, sizes: dict[str, int]) -> None:
        births, deaths = self._outlive(block)
        sizes.update(births)
        for name in deaths:
            sizes.pop(name, None)

    def _outlive(self, block: Block) -> Outlive:
        if id(block) not in self.outlives:
            self.outlives[id(block)] = _outlive(block)
        return self.outlives[id(block)]


def _outlive(block: Block) -> Outlive:
    """The storages that a block leaves alive, and the earlier ones that it frees."""
    return _outlive_parts(block.parts)


def _outlive_parts(parts: Sequence[Part]) -> Outlive:
    births: dict[str, int] = {}
    deaths: list[str] = []
    for part in parts:
        first = outlive_part(part)
        for each in (first, *(first.named(shift.name) for shift in part.shifts)):
            deaths += [name for name in each.deaths if births.pop(name, None) is None]
            births |= each.births
    return Outlive(births, deaths)


def outlive_part(part: Part) -> Outlive:
    """The storages that a part's first period leaves alive, and the earlier ones that it frees."""
    return _outlive_parts(part.inside) if part.periods else outlive_of(part.written)


def outlive_of(actions: Sequence[Action]) -> Outlive:
    """The storages that some actions leave alive, and the earlier ones that they free."""
    births: dict[str, int] = {}
    deaths: list[str] = []
    for action in actions:
        for alloc in action.allocs:
            births[alloc.name] = 0 if alloc.slot else alloc.nbytes
        for name in action.frees:
            if births.pop(name, None) is None:
                deaths.append(name)
    return Outlive(births, deaths)


def _profile(block: Block, sizes: dict[str, int]) -> Profile:
    """A block's effect; `sizes`: bytes of the storages of its micro-batch and chunk that are alive
    at entry (updated in place)."""
    if not block.periods:
        return _effect(block.label, block.written, sizes)
    return _parts_effect(block.label, block.parts, sizes)


def _parts_effect(label: str, parts: Sequence[Part], sizes: dict[str, int]) -> Profile:
    found = Profile._make([0] * len(Profile._fields))
    for part in parts:
        if part.periods is None:
            found = found.then(_effect(label, part.written, sizes))
            continue
        outlive = outlive_part(part)
        freed = [sizes.get(name) for name in outlive.deaths]
        one = _parts_effect(label, part.inside, sizes)
        for number, shift in enumerate(part.shifts, 1):
            births, deaths = outlive.named(shift.name)
            if [sizes.pop(name, None) for name in deaths] != freed:
                raise LedgerError(f"{label}: period {number} frees other bytes than period 0")
            sizes.update(births)
        found = found.then(one.times(part.times))
    return found


def _effect(label: str, actions: Sequence[Action], sizes: dict[str, int]) -> Profile:
    """The effect of some actions of a block `label`.  The loop is plain because every simulation
    spends time here."""
    device = host = pinned = device_high = host_high = pinned_high = 0
    for action in actions:
        for alloc in action.allocs:
            name, nbytes = alloc.name, 0 if alloc.slot else alloc.nbytes
            sizes[name] = nbytes
            if name.endswith(HOST):
                host += nbytes
                pinned += pinned_block_bytes(nbytes)
            else:
                device += nbytes
        if (high := device + action.scratch) > device_high:
            device_high = high
        if action.allocs:
            host_high, pinned_high = max(host_high, host), max(pinned_high, pinned)
        for name in action.frees:
            if name not in sizes:
                raise LedgerError(f"{label} frees {name}: not alive")
            if name.endswith(HOST):
                host -= sizes[name]
                pinned -= pinned_block_bytes(sizes.pop(name))
            else:
                device -= sizes.pop(name)
    return Profile(device, device_high, host, host_high, pinned, pinned_high)


def issue_order(program: Program) -> tuple[RankLedger, ...]:
    """Peaks of every rank with each action applied in issue order."""
    tables = program_profiles(program)
    return tuple(_walk(r, t) for r, t in zip(program.ranks, tables, strict=True))


def _walk(rank: RankProgram, profiles: Sequence[Profile]) -> RankLedger:
    sizes = list(chain.from_iterable(profiles))
    highest = max(map(abs, sizes)) * (len(rank.steps) + 2)  # a bound of every sum below
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


def live_bytes(actions: Iterable[tuple[Action, int, int]]) -> Iterable[tuple[int, int]]:
    """(device, host) live bytes after each action in issue order; tests compare them with an
    interpreter that allocates real memory."""
    sizes: dict[tuple[str, int, int], int] = {}
    device = host = 0
    for action, micro_batch, chunk in actions:
        for alloc in action.allocs:
            nbytes = 0 if alloc.slot else alloc.nbytes
            sizes[(alloc.name, micro_batch, chunk)] = nbytes
            device, host = _move(alloc.name, nbytes, device, host)
        for name in action.frees:
            device, host = _move(name, -sizes.pop((name, micro_batch, chunk)), device, host)
        yield device, host


def _move(name: str, nbytes: int, device: int, host: int) -> tuple[int, int]:
    return (device, host + nbytes) if name.endswith(HOST) else (device + nbytes, host)


def live_at_peak(rank: RankProgram, peak_step: int) -> tuple[Live, ...]:
    """All storages on the device at the rank's peak, for tables and stacked bars; the scratch of
    the peak's action is one entry named `scratch`.  Staging slots are left out: they are a pool."""
    live: dict[tuple[str, int, int], int] = {}
    best: dict[tuple[str, int, int], int] = {}
    best_bytes, total = -1, 0
    for position, step in enumerate(rank.steps[: peak_step + 1]):
        for action in rank.blocks[step.block].actions:
            for alloc in action.allocs:
                if not alloc.name.endswith(HOST) and not alloc.slot:
                    live[(alloc.name, step.micro_batch, step.chunk)] = alloc.nbytes
                    total += alloc.nbytes
            if position == peak_step and total + action.scratch > best_bytes:
                best_bytes = total + action.scratch
                best = dict(live)
                if action.scratch:
                    best[(SCRATCH, step.micro_batch, step.chunk)] = action.scratch
            for name in action.frees:
                total -= live.pop((name, step.micro_batch, step.chunk), 0)
    return tuple(Live(name, mb, chunk, nbytes) for (name, mb, chunk), nbytes in best.items())


def timeline(intervals: Sequence[Interval], rank: int) -> list[tuple[float, int]]:
    """(seconds, live device bytes) of a rank at simulated times, for plots and for `active`.
    Storages begin when the action starts and end when the stream reaches the free; changes at equal
    times keep their issue order.  Staging slots count with their pool."""
    sizes: dict[tuple[str, int, int], int] = {}
    deltas: list[tuple[float, int]] = []
    for item in intervals:
        if item.rank != rank:
            continue
        for alloc in item.action.allocs:
            if not alloc.name.endswith(HOST):
                nbytes = 0 if alloc.slot else alloc.nbytes
                sizes[(alloc.name, item.micro_batch, item.chunk)] = nbytes
                deltas.append((item.start_s, nbytes))
        for name in item.action.frees:
            freed = sizes.pop((name, item.micro_batch, item.chunk), 0)
            deltas.append((item.end_s, -freed))
    total, points = 0, []
    for at, delta in sorted(deltas, key=lambda delta: delta[0]):
        total += delta
        points.append((at, total))
    return points
