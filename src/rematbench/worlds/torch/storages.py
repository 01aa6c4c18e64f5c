"""The storages of a rank by name, with the rows that they hold; staging slots; the host pool."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rematbench.engine.program.action import Action
from rematbench.engine.program.program import RankProgram
from rematbench.engine.program.storage import Slot, Storage
from rematbench.worlds.torch.streams import Mark

Key = tuple[Storage, int, int]


class Span(NamedTuple):
    """The micro-batch, chunk and shard rows [first, first + size) on which an action works."""

    micro_batch: int
    chunk: int
    first: int
    size: int

    @property
    def stop(self) -> int:
        return self.first + self.size

    def key(self, storage: Storage) -> Key:
        return (storage, self.micro_batch, self.chunk)


class ExecutionError(RuntimeError):
    """An action that cannot run; the message names the action and the tensor."""


@dataclass(slots=True)
class Value:
    """A live storage: rows x columns, with the shard rows [first, first + count) of its tensor. A
    count of 0 means bytes without rows."""

    data: Tensor
    first: int = 0
    count: int = 0

    @property
    def blocks(self) -> int:
        """The number of blocks of rows: one, or one for each rank from which rows were gathered."""
        return self.data.shape[0] // self.count if self.count else 1

    def view(self, first: int, count: int) -> Tensor:
        """A view of the shard rows [first, first + count): blocks x count x columns."""
        start = first - self.first
        if start < 0 or start + count > self.count:
            raise ExecutionError(
                f"rows [{first}, {first + count}) are not in "
                f"[{self.first}, {self.first + self.count})"
            )
        whole = self.data.view(self.blocks, self.count, self.data.shape[-1])
        return whole[:, start : start + count]

    def rows(self, first: int, count: int) -> Tensor:
        """The shard rows [first, first + count) of all blocks, (blocks count) x columns. It is the
        storage's tensor if this has exactly these rows, otherwise a view or a copy."""
        if (first, count) == (self.first, self.count) or self.count == 0:
            return self.data
        return self.view(first, count).reshape(-1, self.data.shape[-1])


def compact(tensor: Tensor) -> Tensor:
    """The tensor, contiguous, in a storage of exactly its size; a copy if the storage is larger."""
    tensor = tensor.contiguous()
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat view of the bytes of a compact tensor."""
    return tensor.reshape(-1).view(torch.uint8)


class Memory:
    def __init__(self) -> None:
        self.values: dict[Key, Value] = {}

    def __getitem__(self, key: Key) -> Value:
        found = self.values.get(key)
        if found is None:
            raise ExecutionError(f"{key[0]} of {key[1]}.{key[2]} is not allocated")
        return found

    def put(self, key: Key, value: Value) -> None:
        """Add a storage; ExecutionError if its key is in use."""
        if key in self.values:
            raise ExecutionError(f"{key[0]} of {key[1]}.{key[2]} is already allocated")
        self.values[key] = value

    def free(self, key: Key) -> None:
        """Free a storage; ExecutionError if its key is not in use."""
        if self.values.pop(key, None) is None:
            raise ExecutionError(f"{key[0]} of {key[1]}.{key[2]} is freed but not allocated")


class SlotLayout:
    """The places of tensors in one slot; a tensor goes into the first gap that is large enough."""

    ALIGN = 16

    def __init__(self) -> None:
        self.taken: dict[Key, tuple[int, int]] = {}
        self.size = 0

    def place(self, key: Key, nbytes: int) -> int:
        """Place a tensor and return its first byte. The slot grows if the tensor ends behind it."""
        need, start = -(-nbytes // self.ALIGN) * self.ALIGN, 0
        for other, length in sorted(self.taken.values()):
            if other - start >= need:
                break
            start = other + length
        self.taken[key] = (start, need)
        self.size = max(self.size, start + need)
        return start


class Slots:
    """Staging slots, with one arena of memory per slot. Its size follows from placing the tensors
    of the whole program once."""

    def __init__(self, program: RankProgram, device: torch.device) -> None:
        self.layouts: dict[Slot, SlotLayout] = {}
        self.holder: dict[Key, Slot] = {}
        for action, micro_batch, chunk in program.actions():
            for alloc in action.allocs:
                if alloc.slot:
                    self._place(alloc.slot, (alloc.storage, micro_batch, chunk), alloc.nbytes)
            for freed in action.frees:
                self.release((freed, micro_batch, chunk))
        self.arenas = {
            slot: torch.empty(room.size, dtype=torch.uint8, device=device)
            for slot, room in self.layouts.items()
        }

    def _place(self, slot: Slot, key: Key, nbytes: int) -> int:
        self.holder[key] = slot
        return self.layouts.setdefault(slot, SlotLayout()).place(key, nbytes)

    def take(self, slot: Slot, key: Key, nbytes: int) -> Tensor:
        start = self._place(slot, key, nbytes)
        return self.arenas[slot][start : start + nbytes]

    def release(self, key: Key) -> None:
        slot = self.holder.pop(key, None)
        if slot is not None:
            del self.layouts[slot].taken[key]


class Block(NamedTuple):
    """A block of host memory and the number of its bytes in use. `free_at`: the mark after the last
    use of a spare block; `fresh`: it has just been allocated."""

    data: Tensor
    nbytes: int
    free_at: Mark | None = None
    fresh: bool = False


class HostPool:
    """Host memory for offloaded tensors. On CUDA blocks are pinned, kept and reused by best fit; on
    a CPU they are plain and released. `pinned_bytes` are all bytes that the pool has pinned."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self.spare: list[Block] = []
        self.lent: dict[Key, Block] = {}
        self.pinned_bytes = 0

    def take(self, key: Key, nbytes: int) -> Block:
        """Lend the smallest spare block that is large enough, or a new block. A copy into the block
        must wait for `free_at`."""
        if fitting := [block for block in self.spare if block.data.numel() >= nbytes]:
            found = min(fitting, key=lambda block: block.data.numel())
            self.spare = [other for other in self.spare if other is not found]
            found = found._replace(nbytes=nbytes, fresh=False)
        else:
            data = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pinned)
            found = Block(data, nbytes, fresh=True)
            self.pinned_bytes += nbytes * self.pinned
        self.lent[key] = found
        return found

    def release(self, key: Key, free_at: Mark) -> Block:
        """Take back a block, which is in use until the mark `free_at`; on a CPU it is freed."""
        block = self.lent.pop(key)
        if self.pinned:
            self.spare.append(block._replace(free_at=free_at))
        return block


def describe(action: Action, micro_batch: int, chunk: int) -> str:
    where = ".".join(word for word in (action.part, action.op) if word)
    reads = ",".join(map(str, action.reads))
    return f"{action.kind.value}{micro_batch}.{chunk} {where} {reads}".strip()
