"""Actions that move storages and compute nothing (ALLOC, SPLIT, JOIN, D2H, H2D, FREE), and AdamW on
states in host memory, which runs on a separate thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rematbench.costs.operators.ops import Activation
from rematbench.engine.program.action import (
    GRADIENTS_DOWN,
    HOST_UPDATE,
    SHARD_UP,
    WEIGHTS_UP,
    Action,
    Alloc,
)
from rematbench.engine.program.storage import SHARED, Role, Storage
from rematbench.worlds.torch.arithmetic import wide
from rematbench.worlds.torch.dispatch import Tracker
from rematbench.worlds.torch.parameters import HostShard, Parameter
from rematbench.worlds.torch.rank_model import RankModel
from rematbench.worlds.torch.storages import (
    ExecutionError,
    HostPool,
    Key,
    Memory,
    Slots,
    Span,
    Value,
    as_bytes,
)
from rematbench.worlds.torch.streams import Mark, Streams


class PendingUpdate(NamedTuple):
    """An update in progress. Actions that read the weights wait for it."""

    future: Future[None]

    def wait(self) -> None:
        self.future.result()


class HostUpdates:
    """Runs updates one by one on a thread; an update waits for the events issued before it."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.pool: ThreadPoolExecutor | None = None
        self.latest: PendingUpdate | None = None

    def start(self, work: Callable[[], object], stream: str = HOST_UPDATE) -> PendingUpdate:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, thread_name_prefix=HOST_UPDATE)
        before = self.streams.mark(stream)

        def run() -> None:
            self.streams.synchronize(before)
            work()

        self.latest = PendingUpdate(self.pool.submit(run))
        return self.latest

    def finish(self) -> None:
        if self.latest is not None:
            self.latest.wait()

    def attach(self, mark: Mark) -> None:
        """Make an event complete only after the latest update."""
        if self.latest is not None:
            mark.messages.append(self.latest)


def _copy(target: Tensor, source: Tensor) -> Callable[[], Tensor]:
    return lambda: target.copy_(source, non_blocking=True)


def _add(total: Tensor, arrived: Tensor) -> None:
    total.add_(arrived)


def _host(parameter: Parameter) -> HostShard:
    if parameter.host is None:
        raise ExecutionError(f"{parameter.spec.name} has no states in host memory")
    return parameter.host


class Form(NamedTuple):
    """The dtype and shape of a tensor that was split, its first shard row and number of rows."""

    dtype: torch.dtype
    shape: torch.Size
    first: int
    size: int


class Movers:
    def __init__(
        self,
        model: RankModel,
        memory: Memory,
        slots: Slots,
        tracker: Tracker | None,
        streams: Streams,
        updates: HostUpdates,
    ) -> None:
        self.model, self.memory, self.slots, self.tracker = model, memory, slots, tracker
        self.streams, self.updates = streams, updates
        self.host = HostPool(model.device)
        self.forms: dict[Key, Form] = {}
        self.offload_bytes = 0

    def alloc(self, action: Action, span: Span) -> None:
        if action.op == "gradients":
            self._alloc_gradients(action, span)
            return
        for alloc in action.allocs:
            tensor = self._activation(alloc.storage, span)
            dtype = self.model.dtype_of(tensor)
            make = torch.zeros if alloc.storage.is_gradient else torch.empty
            shape = (tensor.rows, alloc.nbytes // (tensor.rows * dtype.itemsize))
            data = make(shape, dtype=dtype, device=self.model.device)
            self.memory.put(span.key(alloc.storage), Value(data, 0, self.model.shapes.shard_tokens))

    def _alloc_gradients(self, action: Action, span: Span) -> None:
        """Allocate a buffer of zeros for a unit's gradients. The unit's parameters have ranges of
        the buffer as their gradients until the buffer is freed after their update."""
        (alloc,) = action.allocs
        among = self.model.unit_parameters(span.chunk, action.part)
        parameters = [one for one in among if one.spec.trained]
        dtype = wide(self.model.dtype) if self.model.update_in_backward else self.model.dtype
        sizes = [parameter.size for parameter in parameters]
        if sum(sizes) * dtype.itemsize != alloc.nbytes:
            raise ExecutionError(
                f"{alloc.storage} has {alloc.nbytes} bytes, but {sum(sizes)} gradients of {dtype}"
            )
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=self.model.device)
        for parameter, part in zip(parameters, torch.split(buffer, sizes), strict=True):
            parameter.grad_flat = part
        self.memory.put(span.key(alloc.storage), Value(buffer))

    def _activation(self, storage: Storage, span: Span) -> Activation:
        unit = self.model.units[span.chunk].get(storage.part)
        if unit is None:  # the output of the chunk belongs to the layer after its last
            return self.model.chunks[span.chunk].boundary
        return unit.table.activations[storage.tensor]

    def split(self, action: Action, span: Span) -> None:
        """Copy out the kept and offloaded parts: rows if the rest is rebuilt, this rank's rows if
        its tensor-parallel peers keep the rest, otherwise bytes."""
        name = action.reads[0]
        whole = self.memory[span.key(name)]
        data = whole.data
        if action.allocs[0].storage.rows == SHARED:
            own = data.chunk(self.model.problem.layout.tp)[self.model.tp_rank].clone()
            self.memory.put(span.key(action.allocs[0].storage), Value(own))
            return
        self.forms[span.key(name)] = Form(data.dtype, data.shape, whole.first, whole.count)
        total = sum(alloc.nbytes for alloc in action.allocs)
        if total == data.numel() * data.element_size():
            self._split_bytes(action.allocs, span, data)
        else:
            self._split_rows(action.allocs, span, whole)

    def _split_bytes(self, allocs: tuple[Alloc, ...], span: Span, data: Tensor) -> None:
        start, flat = 0, as_bytes(data)
        for alloc in allocs:
            part = flat[start : start + alloc.nbytes].clone()
            self.memory.put(span.key(alloc.storage), Value(part))
            start += alloc.nbytes

    def _split_rows(self, allocs: tuple[Alloc, ...], span: Span, whole: Value) -> None:
        data, first = whole.data, whole.first
        row_bytes = data.numel() * data.element_size() // whole.count
        for alloc in allocs:
            count, odd = divmod(alloc.nbytes, row_bytes)
            if odd:
                raise ExecutionError(f"{alloc.storage}: {alloc.nbytes} bytes are not whole rows")
            part = whole.view(first, count).reshape(-1, data.shape[-1]).clone()
            self.memory.put(span.key(alloc.storage), Value(part, first, count))
            first += count

    def join(self, action: Action, span: Span) -> None:
        """Join the parts into the whole tensor."""
        name = action.allocs[0].storage
        form = self.forms.pop(span.key(name))
        data = torch.empty(form.shape, dtype=form.dtype, device=self.model.device)
        whole = Value(data, form.first, form.size)
        parts = [self.memory[span.key(part)] for part in action.reads]
        if all(part.count == 0 for part in parts):
            torch.cat([part.data for part in parts], out=as_bytes(data))
        else:
            self._join_rows(whole, parts, name)
        self.memory.put(span.key(name), whole)

    def _join_rows(self, whole: Value, parts: list[Value], name: Storage) -> None:
        """Write the parts into the whole tensor: the rebuilt rows, then the kept rows over them."""
        for part in reversed(parts):
            target = whole.view(part.first, part.count)
            target.copy_(part.data.view(target.shape))
        held = _rows_held(parts)
        if held != whole.count:
            raise ExecutionError(f"{name}: its parts have {held} of {whole.count} rows")

    def to_host(self, action: Action, span: Span) -> None:
        """Copy a storage into the host pool, or gradients into the buffers of an update on the
        host."""
        if self.model.pieces and action.part.letter == "P":
            self.model.pieces.to_host(action, span, self.memory, self.streams)
            return
        if action.op == GRADIENTS_DOWN and action.reads:
            self._add_on_host(action, span)
            return
        if action.op == GRADIENTS_DOWN:
            for one in self.model.parameters.values():
                self.streams.run(action.stream, _copy(_host(one).grad, one.own_grad))
            return
        source, alloc = self.memory[span.key(action.reads[0])], action.allocs[0]
        nbytes = source.data.numel() * source.data.element_size()
        with self.tracker.on_host() if self.tracker else nullcontext():
            block = self.host.take(span.key(alloc.storage), nbytes)
        if self.tracker is not None and self.host.pinned:  # the pool keeps the block itself
            if block.fresh:
                self.tracker.exclude([block.data])
            self.tracker.count_host_bytes(block.nbytes)
        if block.free_at is not None:
            self.streams.wait(action.stream, block.free_at)
        data = source.data
        copy = block.data[:nbytes].view(data.dtype).view(data.shape)
        self.streams.run(action.stream, lambda: copy.copy_(data, non_blocking=True))
        self.offload_bytes += nbytes
        self.memory.put(span.key(alloc.storage), Value(copy, source.first, source.count))

    def _add_on_host(self, action: Action, span: Span) -> None:
        """Copy this rank's range of a unit's gradients to the host, whose thread adds it to the
        sums. The copy waits until the thread has added the range of the previous micro-batch."""
        for storage in action.reads:
            states = self.model.unit_states[span.chunk][storage.part]
            assert states.arrival is not None
            if states.added is not None:
                states.added.wait()
            source, arrival = states.part(self.memory[span.key(storage)].data), states.arrival
            self.streams.run(action.stream, _copy(arrival, source))
            sums = states.gradients
            states.added = self.updates.start(partial(_add, sums, arrival), action.stream)

    def to_device(self, action: Action, span: Span) -> None:
        """Reload a storage into new memory or a staging slot, or bring updated weights back."""
        if self.model.pieces and action.part.letter == "P":
            self.model.pieces.to_device(action, span, self.memory, self.streams)
            return
        if action.op == WEIGHTS_UP:
            for one in self.model.parameters.values():
                self.streams.run(action.stream, _copy(one.own_value, _host(one).value))
            return
        if action.op == SHARD_UP:
            states = self.model.unit_states[span.chunk][action.part]
            with self.streams.storage_pool():
                whole = torch.empty(states.size, dtype=self.model.dtype, device=self.model.device)
            self.streams.run(action.stream, _copy(states.part(whole), states.weights), whole)
            self.memory.put(span.key(action.allocs[0].storage), Value(whole))
            states.lend_weights(whole)
            return
        source, alloc = self.memory[span.key(action.reads[0])], action.allocs[0]
        if alloc.slot:
            room = self.slots.take(alloc.slot, span.key(alloc.storage), alloc.nbytes)
            data = room.view(source.data.dtype).view(source.data.shape)
        else:
            with self.streams.storage_pool():
                data = torch.empty_like(source.data, device=self.model.device)
        host = source.data
        fresh = None if alloc.slot else data  # the last tensor in a slot may still be read
        self.streams.run(action.stream, lambda: data.copy_(host, non_blocking=True), fresh)
        self.memory.put(span.key(alloc.storage), Value(data, source.first, source.count))

    def move_to_slots(self, action: Action, span: Span) -> None:
        """Move an action's outputs into the staging slots that the plan gives them."""
        for alloc in action.allocs:
            if alloc.slot and span.key(alloc.storage) not in self.slots.holder:
                value = self.memory[span.key(alloc.storage)]
                room = self.slots.take(alloc.slot, span.key(alloc.storage), alloc.nbytes)
                data = room.view(value.data.dtype).view(value.data.shape)
                data.copy_(value.data)
                value.data = data

    def free(self, key: Key) -> None:
        storage, _, chunk = key
        if storage.role is Role.WEIGHTS:
            self.model.unit_states[chunk][storage.part].drop_weights()
        if storage.role is Role.WEIGHT_GRADIENTS:
            for parameter in self.model.unit_parameters(chunk, storage.part):
                parameter.grad_flat = parameter.grad_flat.new_empty(0)
        self.memory.free(key)
        self.slots.release(key)
        if key in self.host.lent:
            block = self.host.release(key, self.streams.mark("compute"))
            if self.tracker is not None and self.host.pinned:
                self.tracker.count_host_bytes(-block.nbytes)


def _rows_held(parts: list[Value]) -> int:
    """The number of distinct rows in the parts."""
    held, end = 0, 0
    for first, stop in sorted((part.first, part.first + part.count) for part in parts):
        held += max(0, stop - max(first, end))
        end = max(end, stop)
    return held
