"""The effect of a block on live bytes, and the storages that outlive the block.

An action that frees a storage does not know the storage's size. So a block that frees a storage of
another block is measured after that block.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from rematbench.costs.copies import pinned_block_bytes
from rematbench.engine.program.action import Action
from rematbench.engine.program.program import Part, Program, RankProgram
from rematbench.engine.program.storage import HOST, Storage


class Profile(NamedTuple):
    """The effect of a block on live bytes: the net bytes, and the peak above the level at entry;
    for the device, for the host, and for the pinned blocks that hold the host bytes."""

    device_net: int
    device_high: int
    host_net: int
    host_high: int
    pinned_net: int
    pinned_high: int

    def then(self, after: "Profile") -> "Profile":
        pairs = zip(self[::2], self[1::2], after[::2], after[1::2], strict=True)
        found = ((net + more, max(high, net + higher)) for net, high, more, higher in pairs)
        return Profile._make(chain.from_iterable(found))

    def times(self, count: int) -> "Profile":
        pairs = zip(self[::2], self[1::2], strict=True)
        found = ((count * net, max(high, (count - 1) * net + high)) for net, high in pairs)
        return Profile._make(chain.from_iterable(found))


class Lifetimes(NamedTuple):
    """Storages that are alive at only one end of a block. `births`: the bytes of each storage that
    the block leaves alive; `deaths`: storages of earlier blocks that the block frees."""

    births: dict[Storage, int]
    deaths: list[Storage]

    def renamed(self, new: Callable[[Storage], Storage]) -> "Lifetimes":
        births = {new(storage): nbytes for storage, nbytes in self.births.items()}
        return Lifetimes(births, [*map(new, self.deaths)])


class LedgerError(ValueError):
    """An action frees a storage that is not alive."""


def program_profiles(program: Program) -> list[list[Profile]]:
    """Return the profiles of each rank's blocks.  The size of a tensor that a block frees but does
    not allocate comes from the block that allocated it."""
    profiler = _Profiler()
    return [profiler.rank(rank) for rank in program.ranks]


class _Profiler:
    """Computes each block's profile once, even if ranks share the block."""

    def __init__(self) -> None:
        self.profiles: dict[int, Profile] = {}  # the key is the block's id
        self.outlives: dict[int, Lifetimes] = {}

    def rank(self, rank: RankProgram) -> list[Profile]:
        """The profiles of a rank's blocks. A block may free tensors that another block allocated
        for the same micro-batch and chunk. Their sizes come from the steps of the first micro-batch
        and chunk for which the block runs."""
        left = {id(block): block for block in rank.blocks if id(block) not in self.profiles}
        for key, block in list(left.items()):
            sizes: dict[Storage, int] = {}
            try:
                self.profiles[key] = _profile(block.label, block.parts, sizes)
            except LedgerError:  # The block frees a storage of another block.
                continue
            self.outlives[key] = Lifetimes(sizes, [])
            del left[key]
        first = {step[0]: step[1:] for step in rank.first_steps} if left else {}
        alive: dict[tuple[int, ...], dict[Storage, int]] = {
            where: {} for index, where in first.items() if id(rank.blocks[index]) in left
        }
        for step in rank.steps:
            if not left:
                break
            here = alive.get(step[1:])
            if here is None:
                continue
            block = rank.blocks[step[0]]
            if left.pop(id(block), None) is not None:
                self.profiles[id(block)] = _profile(block.label, block.parts, here)
                continue
            if id(block) not in self.outlives:
                self.outlives[id(block)] = _outlive(block.parts)
            births, deaths = self.outlives[id(block)]
            here.update(births)
            for dead in deaths:
                here.pop(dead, None)
        return [self.profiles[id(block)] for block in rank.blocks]


def _outlive(parts: Sequence[Part]) -> Lifetimes:
    births: dict[Storage, int] = {}
    deaths: list[Storage] = []
    for part in parts:
        first = part_lifetimes(part)
        for each in (first, *(first.renamed(shift.storage) for shift in part.shifts)):
            deaths += [dead for dead in each.deaths if births.pop(dead, None) is None]
            births |= each.births
    return Lifetimes(births, deaths)


def part_lifetimes(part: Part) -> Lifetimes:
    return _outlive(part.inside) if part.periods else _outlive_of(part.written)


def _outlive_of(actions: Sequence[Action]) -> Lifetimes:
    births: dict[Storage, int] = {}
    deaths: list[Storage] = []
    for action in actions:
        for alloc in action.allocs:
            births[alloc.storage] = 0 if alloc.slot else alloc.nbytes
        for freed in action.frees:
            if births.pop(freed, None) is None:
                deaths.append(freed)
    return Lifetimes(births, deaths)


def _profile(label: str, parts: Sequence[Part], sizes: dict[Storage, int]) -> Profile:
    """The effect of some parts of the block `label`. `sizes`: bytes of the live storages of the
    same micro-batch and chunk; it is updated in place."""
    found = Profile._make([0] * len(Profile._fields))
    for part in parts:
        if part.periods is None:
            found = found.then(_effect(label, part.written, sizes))
            continue
        outlive = part_lifetimes(part)
        freed = [sizes.get(dead) for dead in outlive.deaths]
        one = _profile(label, part.inside, sizes)
        for number, shift in enumerate(part.shifts, 1):
            births, deaths = outlive.renamed(shift.storage)
            if [sizes.pop(dead, None) for dead in deaths] != freed:
                raise LedgerError(f"{label}: period {number} does not free the bytes of period 0")
            sizes.update(births)
        found = found.then(one.times(part.times))
    return found


def _effect(label: str, actions: Sequence[Action], sizes: dict[Storage, int]) -> Profile:
    """The effect of some actions of the block `label`. The loop is plain, because it must be
    fast."""
    device = host = pinned = device_high = host_high = pinned_high = 0
    for action in actions:
        for alloc in action.allocs:
            storage, nbytes = alloc.storage, 0 if alloc.slot else alloc.nbytes
            sizes[storage] = nbytes
            if storage.place == HOST:
                host += nbytes
                pinned += pinned_block_bytes(nbytes)
            else:
                device += nbytes
        if (high := device + action.scratch) > device_high:
            device_high = high
        if host > host_high or pinned > pinned_high:
            host_high, pinned_high = max(host_high, host), max(pinned_high, pinned)
        for storage in action.frees:
            if storage not in sizes:
                raise LedgerError(f"{label} frees {storage}, which is not alive")
            nbytes = sizes.pop(storage)
            if storage.place == HOST:
                host -= nbytes
                pinned -= pinned_block_bytes(nbytes)
            else:
                device -= nbytes
    return Profile(device, device_high, host, host_high, pinned, pinned_high)
