"""CUDA without a GPU: fake tensors on `cuda`, and stand-ins for streams, events and NCCL that keep
vector clocks.  Every operator's reads and writes are noted on the stream that issued it.

What it finds: a read or write on one stream that is not ordered behind another's write (or read);
memory freed, or taken again from the caching allocator, while a stream may still use it; a call
that holds up the host.  The allocator is torch's: a pool for each stream, blocks given out again in
the host's order, `record_stream` holding one back until the named stream is past its free.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from rematbench.worlds.torch import arithmetic, movers, streams
from rematbench.worlds.torch.dispatch import DispatchMode

Clock = dict[str, int]

FUSED_ADAMW = "aten::_fused_adamw_"
"""Its schema says that it writes the gradients, which it does only to undo a `grad_scale`."""
SHAPED_LIKE = ("aten::new_", "aten::empty_like", "aten::zeros_like", "aten::ones_like")
"""Operators that ask a tensor for its shape and dtype alone."""


def joined(a: Clock, b: Clock) -> Clock:
    """How far both know."""
    return {name: max(a.get(name, 0), b.get(name, 0)) for name in {*a, *b}}


def behind(clock: Clock, ticks: Clock) -> list[str]:
    """Streams whose ticks a clock does not know of."""
    return [name for name, tick in ticks.items() if clock.get(name, 0) < tick]


class Stream:
    """A stand-in for torch.cuda.Stream."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, {name: 0}

    def wait_event(self, event: "Event") -> None:
        self.clock = joined(self.clock, event.clock)

    def wait_stream(self, other: "Stream") -> None:
        self.clock = joined(self.clock, other.clock)


class Event:
    """A stand-in for torch.cuda.Event."""

    def __init__(self, recorder: "Recorder | None" = None, **_: object) -> None:
        self.clock: Clock = {}
        self.recorder = recorder
        self.recorded = self.reached = False

    def wait(self) -> None:
        """The current stream waits."""
        self.recorder.current.wait_event(self)

    def record(self, stream: Stream) -> None:
        self.clock = dict(stream.clock)
        self.recorded = True

    def synchronize(self) -> None:
        """The calling thread waits."""
        self.reached = self.recorded
        if self.recorder is not None:
            self.recorder.known(self.clock)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds, as far as a stand-in knows: pieces of work in between.  Torch asks that
        both were recorded and that the device is past the end."""
        assert self.recorded
        assert end.reached
        return float(sum(end.clock.values()) - sum(self.clock.values()))


@dataclass
class Used:
    """One storage: who made it, what its memory was used for before, and its uses."""

    pool: str
    before: Clock
    ranges: dict[tuple[int, int], "Uses"] = field(default_factory=dict)
    touched: Clock = field(default_factory=dict)
    lent: list[Stream] = field(default_factory=list)


@dataclass
class Uses:
    """The last uses of a range of a storage's bytes."""

    wrote: Clock = field(default_factory=dict)
    touched: Clock = field(default_factory=dict)


def range_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return first, first + size * (1 + sum((n - 1) * step for n, step in steps if n))


class Work:
    """A message under way on its communicator's own stream; its memory lives as long as this."""

    def __init__(self, recorder: "Recorder", stream: Stream, tensor: Tensor) -> None:
        self.recorder, self.clock = recorder, dict(stream.clock)
        self.outputs = [tensor.detach()]

    def wait(self) -> None:
        current = self.recorder.current
        current.clock = joined(current.clock, self.clock)


class Thread:
    """A stand-in for ThreadPoolExecutor(1): a stream of its own on the host.  Work is done where it
    is submitted, and is ordered behind no more than what it waits for itself and its own past."""

    def __init__(self, recorder: "Recorder", workers: int, *, thread_name_prefix: str) -> None:
        assert workers == 1
        self.recorder, self.stream = recorder, Stream(thread_name_prefix + " thread")

    def submit(self, work: Callable[[], None]) -> "Result":
        """Run the work as this thread's."""
        recorder, issuing = self.recorder, self.recorder.current
        self.stream.clock = joined(self.stream.clock, recorder.host)
        recorder.current = recorder.thread = self.stream
        try:
            work()
        finally:
            recorder.current, recorder.thread = issuing, None
        return Result(recorder, dict(self.stream.clock))


class Result(NamedTuple):
    """A stand-in for a thread's Future."""

    recorder: "Recorder"
    clock: Clock

    def result(self) -> None:
        """The host waits."""
        self.recorder.known(self.clock)


class Found(Exception):
    """A fault, where nobody asks for a second one."""


class Recorder(DispatchMode):
    """Watches operators on fake tensors; `faults` says what it found (`first`: it ends there)."""

    def __init__(self, *, first: bool = False) -> None:
        super().__init__()
        self.first = first
        self.current = Stream("default")
        self.streams: list[Stream] = [self.current]
        self.host: Clock = {}  # what the thread that issues work has waited for
        self.thread: Stream | None = None  # another thread of the host, while it runs
        self.internal: dict[int, Stream] = {}
        self.used: dict[int, Used] = {}
        self.refs: dict[int, Any] = {}
        self.freed: dict[str, Clock] = {}
        self.faults: list[str] = []
        self.operators = 0
        self.watching = False  # whether a call that holds up the host is a fault

    def fault(self, words: str) -> None:
        """Note what is wrong."""
        self.faults.append(words)
        if self.first:
            raise Found(words)

    # -- operators ----------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._blocks(func, args, kwargs)
        result = func(*args, **kwargs)
        schema = func._schema
        aliases = [a.alias_info for a in schema.arguments]
        if any(alias is not None and not alias.is_write for alias in aliases):
            return result  # a view
        self.operators += 1
        reads, writes = self._arguments(schema, args, kwargs)
        name = func.name()
        if name.startswith("prim::"):
            return result
        for tensor in () if name.startswith(SHAPED_LIKE) else reads:
            self.touch(tensor, name, write=False)
        for tensor in writes:
            self.touch(tensor, name, write=True)
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._made(tensor)
                if not name.startswith("aten::empty") and not name.startswith("aten::new_empty"):
                    self.touch(tensor, name, write=True)
        return result

    def _arguments(self, schema: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
        unscaled = schema.name == FUSED_ADAMW and (kwargs or {}).get("grad_scale") is None
        for argument, value in given:
            kept = unscaled and argument.name == "grads"
            into = writes if argument.alias_info is not None and not kept else reads
            into += [item for item in tree_iter(value) if isinstance(item, Tensor)]
        return reads, writes

    def _blocks(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note what makes the host wait for the device."""
        name = func.name()
        if not self.watching:
            return
        kinds = {item.device.type for item in tree_iter((args, kwargs)) if isinstance(item, Tensor)}
        to = kwargs.get("device")
        kinds |= {torch.device(to).type} if to is not None and kinds else set()
        moves = len(kinds) > 1 and name in ("aten::copy_", "aten::_to_copy")
        asked = kwargs.get("non_blocking") or (name == "aten::copy_" and args[2:3] == (True,))
        if name in ("aten::_local_scalar_dense", "aten::nonzero") or (moves and not asked):
            self.fault(f"{name} holds up the host")

    # -- storages -----------------------------------------------------------------------------

    def _made(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.used:
            return
        pool = self.current.name if tensor.device.type == "cuda" else "host"
        self.used[key] = Used(pool, dict(self.freed.get(pool, {})))
        self.refs[key] = weakref.ref(storage, lambda _, key=key: self._gone(key))

    def touch(self, tensor: Tensor, what: str, *, write: bool, on: Stream | None = None) -> None:
        """A stream (the current one) reads or writes a storage."""
        self._made(tensor)
        stream, found = on or self.current, self.used[tensor.untyped_storage()._cdata]
        first, last = range_of(tensor)
        for (start, stop), uses in found.ranges.items():
            if start < last and first < stop:
                for name in behind(stream.clock, uses.touched if write else uses.wrote):
                    self.fault(f"{what} on {stream.name} does not wait for {name}")
        for name in behind(stream.clock, found.before):
            self.fault(f"{what} on {stream.name} is in memory that {name} may still use")
        stream.clock[stream.name] += 1
        tick = found.touched[stream.name] = stream.clock[stream.name]
        uses = found.ranges.setdefault((first, last), Uses())
        uses.touched[stream.name] = tick
        if write:
            uses.wrote = {stream.name: tick}

    def lend(self, tensor: Tensor, stream: Stream) -> None:
        """Tensor.record_stream."""
        self.used[tensor.untyped_storage()._cdata].lent.append(stream)

    def _gone(self, key: int) -> None:
        """Python let go of a storage: its pool may give the memory out again."""
        found = self.used.pop(key)
        del self.refs[key]
        if found.pool == "host":
            return
        held = [stream.clock for stream in found.lent]
        for name, tick in found.touched.items():
            if any(clock.get(name, 0) >= tick for clock in held):
                continue  # given out only when the stream it was lent to is past this
            freed = self.freed.setdefault(found.pool, {})
            freed[name] = max(freed.get(name, 0), tick)

    # -- streams ------------------------------------------------------------------------------

    def stream(self, *_: object) -> Stream:
        made = Stream(f"s{len(self.streams)}")
        made.clock |= self.host
        self.streams.append(made)
        return made

    def known(self, clock: Clock) -> None:
        """A thread of the host has waited: what it does next is behind all that the clock knows,
        and what the issuing thread does next is all that any stream gets from now on."""
        if self.thread is not None:
            self.thread.clock = joined(self.thread.clock, clock)
            return
        self.host = joined(self.host, clock)
        for stream in self.streams:
            stream.clock = joined(stream.clock, clock)

    def switch(self, stream: Stream) -> None:
        """torch.cuda.set_stream."""
        self.current = stream

    # -- NCCL ---------------------------------------------------------------------------------

    def collective(self, out: Tensor, own: Tensor, **_: object) -> None:
        """On the current stream, as torch runs what is not asynchronous."""
        self.touch(own, "collective", write=False)
        self.touch(out, "collective", write=True)

    def message(self, tensor: Tensor, *, group: Any, write: bool) -> Work:
        """On the communicator's stream, behind the current one."""
        stream = self.internal.setdefault(id(group), Stream(f"nccl{len(self.internal)}"))
        stream.wait_stream(self.current)
        self.touch(tensor, "message", write=write, on=stream)
        return Work(self, stream, tensor)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Put the stand-ins in the place of torch's."""
        for name in ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor"):
            patch.setattr(dist, name, self.collective, raising=False)
        for name in ("reduce_scatter_single", "all_to_all_single"):
            patch.setattr(dist, name, self.collective, raising=False)
        patch.setattr(dist, "all_reduce", lambda x, **_: self.touch(x, "collective", write=True))
        patch.setattr(
            dist, "isend", lambda x, dst, group, tag: self.message(x, group=group, write=False)
        )
        patch.setattr(
            dist, "irecv", lambda x, src, group, tag: self.message(x, group=group, write=True)
        )
        patch.setattr(torch.cuda, "Stream", self.stream)
        patch.setattr(streams, "CUDA_STREAMS", {})
        patch.setattr(movers, "ThreadPoolExecutor", partial(Thread, self))
        patch.setattr(torch.cuda, "set_stream", self.switch)
        patch.setattr(torch.cuda, "Event", partial(Event, self))
        patch.setattr(arithmetic, "fused", lambda x: False)  # a build without CUDA has none
        patch.setattr(arithmetic, "PARTS", 1)  # a GPU's sum is one kernel
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.streams[0])

        def record_stream(tensor: Tensor, stream: Stream) -> None:
            self.lend(tensor, stream)

        patch.setattr(Tensor, "record_stream", record_stream)


class Plainly(TorchFunctionMode):
    """x[...] and copies by plain operators: torch's own entries ask a device guard that a build
    without CUDA does not have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return indexed(*args)
        if func is Tensor.__setitem__:
            into, value = indexed(*args[:2]), args[2]
            return copied(into, value) if isinstance(value, Tensor) else into.fill_(value)
        if func is Tensor.copy_:
            return copied(*args, **(kwargs or {}))
        if func is Tensor.__invert__:
            return torch.bitwise_not(*args)
        if func is Tensor.contiguous:
            x = args[0]
            return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def copied(into: Tensor, value: Tensor, non_blocking: bool = False) -> Tensor:
    """into.copy_(value)."""
    done: Tensor = torch.ops.aten.copy_(into, value, non_blocking)
    return done


def indexed(x: Tensor, index: Any) -> Tensor:
    """x[index] for numbers, slices, None, an ellipsis and one tensor."""
    words = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [word for word in words if not isinstance(word, Tensor)]:
        at = words.index(Ellipsis)
        used = sum(word is not None for word in words) - 1
        words[at : at + 1] = [slice(None)] * (x.dim() - used)
    dim = 0
    for word in words:
        match word:
            case None:
                x, dim = x.unsqueeze(dim), dim + 1
            case int():
                x = x.select(dim, word)
            case slice():
                whole = word == slice(None)
                x = x if whole else torch.ops.aten.slice(x, dim, word.start, word.stop)
                dim += 1
            case Tensor():
                x, dim = torch.ops.aten.index(x, [*([None] * dim), word]), dim + 1
            case _:
                raise TypeError(f"index {word!r}")
    return x


@contextmanager
def recording(patch: pytest.MonkeyPatch, *, first: bool = False) -> Iterator[Recorder]:
    """Fake tensors under a recorder."""
    recorder = Recorder(first=first)
    recorder.install(patch)
    with FakeTensorMode(), recorder, Plainly():
        yield recorder
