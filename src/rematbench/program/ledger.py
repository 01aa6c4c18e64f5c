"""The two ledgers of activation bytes: in issue order (what an allocator sees) and on the timeline.

The issue-order ledger needs no costs: a block's effect is its net bytes and its highest point, so
a whole step is a walk over blocks.  Tensors in a staging slot are counted with their pool, once.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from rematbench.cost.copies import pinned_block_bytes
from rematbench.program.action import HOST, Action, tenant
from rematbench.program.program import Block, Program, RankProgram
from rematbench.simulate.step import Interval


class Profile(NamedTuple):
    """Effect of one block: net and highest bytes above entry, on the device, on the host, and in
    the host blocks that are pinned for them."""

    device_net: int
    device_high: int
    host_net: int
    host_high: int
    pinned_net: int
    pinned_high: int


class Outlive(NamedTuple):
    """Bytes of what a block leaves alive, and names of what it ends that was alive."""

    births: dict[str, int]
    deaths: list[str]


class RankLedger(Struct, frozen=True, kw_only=True):
    """Peaks of one rank's activations, where they occur (step index), and what is left over;
    `pinned` counts host bytes in the blocks that torch pins for them."""

    device_peak_bytes: int
    host_peak_bytes: int
    pinned_peak_bytes: int
    peak_step: int
    device_left_bytes: int
    host_left_bytes: int


SCRATCH = "scratch"
"""Name of the bytes that live inside one action."""


class Live(NamedTuple):
    """A storage that is alive: who holds it, how big it is."""

    name: str
    micro_batch: int
    chunk: int
    nbytes: int


def pool_bytes(rank: RankProgram) -> int:
    """Bytes of the rank's staging pools: each slot is as large as its largest tenant."""
    slots: dict[str, int] = {}
    for block in rank.blocks:
        here: dict[tuple[str, str], int] = {}
        for action in block.actions:
            for alloc in action.allocs:
                if alloc.slot:
                    key = (alloc.slot, tenant(alloc.name, alloc.slot))
                    here[key] = here.get(key, 0) + alloc.nbytes
        for (slot, _), nbytes in here.items():
            slots[slot] = max(slots.get(slot, 0), nbytes)
    return sum(slots.values())


class LedgerError(ValueError):
    """An action frees what is not alive, or allocates twice."""


def program_profiles(program: Program) -> list[list[Profile]]:
    """Profiles of every rank's blocks; sizes of freed tensors come from whoever allocated them."""
    profiler = _Profiler()
    return [profiler.rank(rank) for rank in program.ranks]


class _Profiler:
    """Profiles of blocks, each made once: ranks that share a block run it alike."""

    def __init__(self) -> None:
        self.profiles: dict[int, Profile] = {}  # by identity of the block
        self.outlives: dict[int, Outlive] = {}

    def rank(self, rank: RankProgram) -> list[Profile]:
        """Walk the rank until every block that ends another block's tensors has met their sizes."""
        alive: dict[tuple[int, int], dict[str, int]] = {}
        left = {id(block): block for block in rank.blocks if id(block) not in self.profiles}
        for key, block in list(left.items()):
            if not self._outlive(block).deaths:
                self.profiles[key] = _profile(left.pop(key), {})
        for index, micro_batch, chunk in rank.steps:
            if not left:
                break
            block, sizes = rank.blocks[index], alive.setdefault((micro_batch, chunk), {})
            if left.pop(id(block), None) is None:
                self._replay(block, sizes)
            else:
                self.profiles[id(block)] = _profile(block, sizes)
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
    """What a block leaves alive, and what it ends that was alive before."""
    births: dict[str, int] = {}
    deaths: list[str] = []
    for action in block.actions:
        for alloc in action.allocs:
            births[alloc.name] = 0 if alloc.slot else alloc.nbytes
        for name in action.frees:
            if births.pop(name, None) is None:
                deaths.append(name)
    return Outlive(births, deaths)


def _profile(block: Block, sizes: dict[str, int]) -> Profile:
    """A block's effect; `sizes`: what is alive of its micro-batch and chunk when it starts."""
    device = host = pinned = device_high = host_high = pinned_high = 0
    for action in block.actions:
        for alloc in action.allocs:
            name, nbytes = alloc.name, 0 if alloc.slot else alloc.nbytes
            sizes[name] = nbytes
            if name.endswith(HOST):
                host += nbytes
                pinned += pinned_block_bytes(nbytes)
            else:
                device += nbytes
        device_high = max(device_high, device + action.scratch)
        host_high = max(host_high, host)
        pinned_high = max(pinned_high, pinned)
        for name in action.frees:
            if name not in sizes:
                raise LedgerError(f"{block.label} frees {name}: not alive")
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
    device = host = pinned = device_peak = host_peak = pinned_peak = peak_step = 0
    for position, (block, _, _) in enumerate(rank.steps):
        device_net, device_high, host_net, host_high, pinned_net, pinned_high = profiles[block]
        if device + device_high > device_peak:
            device_peak, peak_step = device + device_high, position
        if host_high and host + host_high > host_peak:
            host_peak = host + host_high
        if pinned_high and pinned + pinned_high > pinned_peak:
            pinned_peak = pinned + pinned_high
        device += device_net
        host += host_net
        pinned += pinned_net
    return RankLedger(
        device_peak_bytes=device_peak,
        host_peak_bytes=host_peak,
        pinned_peak_bytes=pinned_peak,
        peak_step=peak_step,
        device_left_bytes=device,
        host_left_bytes=host,
    )


def live_bytes(actions: Iterable[tuple[Action, int, int]]) -> Iterable[tuple[int, int]]:
    """(device, host) live bytes after each action, in issue order: the twin law's left side."""
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
    """Everything on the device at the rank's peak, scratch inside the peak's action as one entry of
    that name (for tables and stacked bars).  Staging slots are not listed: they are a pool."""
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
    """(seconds, live device bytes) of a rank with the deltas at simulated times: allocations when
    the action starts, frees when the stream reaches them (for plots and for `active`); what happens
    at one time keeps its issue order.  Staging slots count with their pool."""
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
