"""A model of PyTorch's caching allocator; replay.py feeds it a rank's allocations and frees.

Rules and constants are facts of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.0 to 2.8): sizes are
multiples of 512 B; requests up to 1 MiB use the small pool (segments of 2 MiB), larger requests the
large pool (segments of 20 MiB for requests below 10 MiB, otherwise of the size rounded up to 2
MiB); best fit; a remainder is split off when it has at least 512 B (small pool) or more than 1 MiB
(large pool); neighbours inside a segment coalesce; when cudaMalloc fails, wholly free segments are
given back and cudaMalloc is tried once more.  Mode `expandable` instead maps pages at the end of
one growing segment per pool.  Each stream on which code allocates has separate pools (POOLS), and
no other stream takes a block from them.  A freed block can be reused at once, as in the issue-order
ledger.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict
from functools import lru_cache
from itertools import chain
from typing import Literal

from msgspec import Struct

Mode = Literal["default", "expandable"]

MIB = 1 << 20
MIN_BLOCK = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
LARGE_SEGMENT, MIN_LARGE, ROUND_LARGE = 20 * MIB, 10 * MIB, 2 * MIB
GAP = MIN_BLOCK
"""Unused addresses between segments, so that blocks of two segments never touch and merge."""

POOLS = ("", "dp", "ep", "reduced")
"""The streams on which frameworks allocate: "dp" for gathers of sharded parameters (FSDP's unshard
stream, DeepSpeed's all-gather stream), "ep" for exchanges of experts beside another micro-batch
(Megatron-core's combined 1F1B), "reduced" for gradients that FSDP's post-backward stream reduces
(torch, distributed/fsdp/_runtime_utils.py: _post_backward_hook), and "", the compute stream, for
outputs of kernels, of all other collectives and of messages."""

BITS = 96
ADDRESS = (1 << BITS) - 1
"""The mask of an address. 96 bits are enough for the bytes of any problem that `check_layout`
admits, including plans that do not fit, because these are replayed too."""


class AllocatorPeaks(Struct, frozen=True, kw_only=True):
    """Peaks of a replay. `oom_at`: the index of the step that did not fit (None: all fit).
    `retries`: how often cudaMalloc failed in the last pass and was retried after cached segments
    were given back (torch's num_alloc_retries). `ended`: the replay stopped early because more than
    `enough_bytes` were reserved; the peaks are those up to this point."""

    reserved_bytes: int
    allocated_bytes: int
    oom_at: int | None = None
    retries: int = 0
    ended: bool = False


class OutOfMemory(Exception):
    """cudaMalloc fails even after all cached segments were given back."""


class Exceeded(Exception):
    """The allocator reserves more than `enough_bytes`."""


class Pool:
    """The free blocks of a pool, sorted by size for best fit and by both ends for merging."""

    def __init__(self, *, small: bool, mode: Mode) -> None:
        self.small, self.expandable = small, mode == "expandable"
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.split_from = MIN_BLOCK if small or self.expandable else SMALL + 1
        self.keys: list[int] = []  # sorted; a key is the size, then the address
        self.starts: dict[int, int] = {}  # maps an address to a size
        self.ends: dict[int, int] = {}  # maps an end to an address
        self.segments: dict[int, int] = {}
        self.end = 0  # the next segment starts here

    def insert(self, address: int, size: int) -> None:
        """Add a free block, merged with the free blocks next to it."""
        before = self.ends.pop(address, None)
        if before is not None:
            joined = self.starts.pop(before)
            del self.keys[bisect_left(self.keys, joined << BITS | before)]
            address, size = before, size + joined
        end = address + size
        after = self.starts.pop(end, None)
        if after is not None:
            del self.keys[bisect_left(self.keys, after << BITS | end)]
            size, end = size + after, end + after
        self.starts[address] = size
        self.ends[end] = address
        insort(self.keys, size << BITS | address)

    def remove(self, address: int) -> int:
        size = self.starts.pop(address)
        del self.ends[address + size]
        del self.keys[bisect_left(self.keys, size << BITS | address)]
        return size

    def take(self, size: int) -> tuple[int, int] | None:
        """Take the free block that fits best, as (address, size); None if no block fits. The rest
        of the block is split off if the rules allow it. The block at the end of an expandable
        segment can grow, so it is taken only if no other fits."""
        at = bisect_left(self.keys, size << BITS)
        if self.expandable and at + 1 < len(self.keys) and self._last(self.keys[at]):
            at += 1
        if at == len(self.keys):
            return None
        key = self.keys.pop(at)
        found, address = key >> BITS, key & ADDRESS
        del self.starts[address]
        if found - size < self.split_from:
            del self.ends[address + found]
            return address, found
        # The remainder needs no merge, because free blocks never touch each other.
        self.starts[address + size] = found - size
        self.ends[address + found] = address + size
        insort(self.keys, found - size << BITS | address + size)
        return address, size

    def _last(self, key: int) -> bool:
        return (key >> BITS) + (key & ADDRESS) == self.end

    def growth(self, size: int) -> int:
        if self.expandable:
            tail = self.end - self.ends[self.end] if self.end in self.ends else 0
            return -(-(size - tail) // self.page) * self.page
        if self.small or size < MIN_LARGE:
            return self.page
        return -(-size // ROUND_LARGE) * ROUND_LARGE

    def grow(self, nbytes: int) -> None:
        self.segments[self.end] = nbytes
        start, self.end = self.end, self.end + nbytes
        self.insert(start, nbytes)
        if not self.expandable:
            self.end += GAP

    def give_back(self) -> int:
        """Return wholly free segments (expandable: pages inside free blocks) to the device, and
        return their bytes."""
        if self.expandable:
            return sum(self._unmap(address) for address in list(self.starts))
        whole = [a for a, size in self.starts.items() if self.segments.get(a) == size]
        for address in whole:
            del self.segments[address]
        return sum(self.remove(address) for address in whole)

    def _unmap(self, address: int) -> int:
        first = -(-address // self.page) * self.page
        last = (address + self.starts[address]) // self.page * self.page
        if last <= first:
            return 0
        size = self.remove(address)
        if first > address:
            self.insert(address, first - address)
        if address + size > last:
            self.insert(last, address + size - last)
        if last == self.end:
            self.end = first
        return last - first


MemoryBlock = tuple[Pool, int, int]
"""A block of memory: its pool, address and size."""


class Allocator:
    """The allocator of a device: a large and a small pool for each of POOLS, and a capacity (None:
    unlimited). It raises Exceeded once it reserves more than `enough_bytes`. Blocks that another
    stream may still read when they are freed (record_stream) are not free at once: in each pool the
    last `waiting_frees` of them wait, although torch no longer counts them as allocated."""

    def __init__(
        self,
        capacity_bytes: int | None,
        mode: Mode,
        enough_bytes: float = math.inf,
        waiting_frees: int = 0,
    ) -> None:
        self.capacity_bytes, self.enough_bytes = capacity_bytes, enough_bytes
        self.pools = [Pool(small=small, mode=mode) for _ in POOLS for small in (False, True)]
        self.reserved = self.allocated = 0
        self.reserved_peak = self.allocated_peak = 0
        self.retries = 0
        self.waiting_frees = waiting_frees
        self.waiting: dict[Pool, list[MemoryBlock]] = defaultdict(list)

    @property
    def state(self) -> tuple[object, ...]:
        """All that the effect of later requests depends on, and the retries so far. If the state is
        the same before and after some requests, they freed all that they allocated, and would
        again."""
        waiting = tuple(block[1:] for blocks in self.waiting.values() for block in blocks)
        return (self.reserved, self.retries, waiting, *(pool.keys.copy() for pool in self.pools))

    def allocate(self, size: int, stream: int = 0) -> MemoryBlock:
        """Allocate `size` bytes (a multiple of 512) on a stream of POOLS, by its index.  Raise
        OutOfMemory if no block can be made."""
        pool = self.pools[2 * stream + (size <= SMALL)]
        block = pool.take(size)
        if block is None:
            self._reserve(pool, size)
            block = pool.take(size)
            assert block is not None
        self.allocated += block[1]
        if self.allocated > self.allocated_peak:  # noqa: PLR1730  max() takes twice as long
            self.allocated_peak = self.allocated
        return pool, *block

    def free(self, block: MemoryBlock, *, waits: bool = False) -> None:
        """Give a block back to its pool. If it `waits`, this follows `waiting_frees` later
        frees."""
        pool, address, size = block
        self.allocated -= size
        if waits and self.waiting_frees:
            waiting = self.waiting[pool]
            waiting.append(block)
            if len(waiting) <= self.waiting_frees:
                return
            pool, address, size = waiting.pop(0)
        pool.insert(address, size)

    def _reserve(self, pool: Pool, size: int) -> None:
        growth = pool.growth(size)
        if self.capacity_bytes is not None and self.reserved + growth > self.capacity_bytes:
            self.retries += 1
            for pool_, address, nbytes in chain.from_iterable(self.waiting.values()):
                pool_.insert(address, nbytes)
            self.waiting.clear()
            self.reserved -= sum(each.give_back() for each in self.pools)
            growth = pool.growth(size)
            if self.reserved + growth > self.capacity_bytes:
                raise OutOfMemory
        self.reserved += growth
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        if self.reserved > self.enough_bytes:
            raise Exceeded
        pool.grow(growth)

    def peaks(self, *, oom_at: int | None = None, ended: bool = False) -> AllocatorPeaks:
        return AllocatorPeaks(
            reserved_bytes=self.reserved_peak,
            allocated_bytes=self.allocated_peak,
            oom_at=oom_at,
            retries=self.retries,
            ended=ended,
        )


@lru_cache(maxsize=4096)
def rounded(nbytes: int) -> int:
    """Round a request's bytes up to a multiple of 512, at least 512."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)
