"""Streams and events behind one interface: CUDA streams on a GPU, issue order on a CPU."""

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist

from rematbench.engine.program.action import STREAMS


# Why: docs/decisions/worlds.md, Has every stream a memory pool of its own?
class PendingMessage(Protocol):
    """A message in flight: torch's handle, or an event recorded when the message is done."""

    def wait(self) -> object:
        """Block the host (gloo) or the current stream (CUDA) until the message is done."""


class Mark:
    """A recorded event: a CUDA event, and the messages and callbacks that belong to it."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event
        self.messages: list[PendingMessage] = []
        self.callbacks: list[Callable[[], object]] = []

    def finish(self) -> None:
        """Wait for the messages (on CUDA the current stream waits, not the host)."""
        while self.messages:
            self.messages.pop(0).wait()
        while self.callbacks:
            self.callbacks.pop(0)()


class Streams:
    """The streams of a device, as the executor uses them. This class is for a CPU, where an action
    is done when it has been issued; only messages are pending."""

    def on(self, stream: str) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self, stream: str) -> Mark:
        return Mark(None)

    def wait(self, stream: str, mark: Mark) -> None:
        """Make a stream wait for an event; on a CPU the host waits for the event's messages."""
        mark.finish()

    def synchronize(self, mark: Mark) -> None:
        """Block the calling thread until an event is complete."""

    def storage_pool(self) -> AbstractContextManager[object]:
        """The context in which to allocate a storage that outlives its action."""
        return nullcontext()

    def share(self, stream: str, tensor: torch.Tensor, reader: str = "compute") -> None:
        """Note that the stream `reader` will use a tensor that another stream made."""

    def run(
        self, stream: str, work: Callable[[], object], fresh: torch.Tensor | None = None
    ) -> None:
        """Issue tensor work on the current stream, which `on` has set; the host has already updated
        storages and names. `fresh`: memory that no stream may read before the work is done."""
        work()

    def pending(self, channel: Hashable, work: dist.Work) -> PendingMessage:
        """The handle on which to wait for a message; a channel's messages are done one by one."""
        return work

    def begin(self) -> None:
        """At a step's start: order all streams after work that was issued outside of them."""

    def flush(self) -> None:
        """At a step's end: order later work outside of the streams after them; raise a failure."""

    def clock(self) -> Callable[[], float]:
        """Start a clock; the returned function gives the seconds since the start."""
        start = time.perf_counter()
        return lambda: time.perf_counter() - start


UNORDERED = frozenset({"pp_recv"})
"""Streams that wait for no other; their storages need memory that compute does not use."""


class Current:
    """The CUDA stream on which a rank issues, between a step's `begin` and `flush`. torch's own
    context asks for the device and the current stream whenever it is entered, which costs ten times
    as much as the switch; this class remembers the stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams: list[torch.cuda.Stream] = []  # the innermost stream is the last

    def hold(self) -> torch.cuda.Stream:
        """Remember the current stream and return it; until `release` only this object switches
        streams."""
        self.streams = [torch.cuda.current_stream(self.device)]
        return self.streams[0]

    def release(self) -> torch.cuda.Stream:
        """Return the current stream and forget it; from now on other code may switch streams."""
        return self.streams.pop() if self.streams else torch.cuda.current_stream(self.device)

    def enter(self, stream: torch.cuda.Stream) -> None:
        if not self.streams:
            self.hold()
        if stream is not self.streams[-1]:
            torch.cuda.set_stream(stream)
        self.streams.append(stream)

    def leave(self) -> None:
        left = self.streams.pop()
        if left is not self.streams[-1]:
            torch.cuda.set_stream(self.streams[-1])


class StreamContext(AbstractContextManager[object]):
    """A context within which work goes to one stream."""

    def __init__(self, current: Current, stream: torch.cuda.Stream) -> None:
        self.current, self.stream = current, stream

    def __enter__(self) -> None:
        self.current.enter(self.stream)

    def __exit__(self, *_: object) -> None:
        self.current.leave()


CUDA_STREAMS: dict[tuple[torch.device, Hashable], torch.cuda.Stream] = {}


def named_stream(device: torch.device, name: Hashable) -> torch.cuda.Stream:
    """The stream of a device with this name; the whole process shares it. torch hands out 32
    streams in turn, so without names one executor's compute stream could be another's copy
    stream."""
    if (device, name) not in CUDA_STREAMS:
        CUDA_STREAMS[device, name] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return CUDA_STREAMS[device, name]


class CudaStreams(Streams):
    """One CUDA stream for each named stream, and events in place of synchronisation.

    Work from outside (batches, zeroed gradients, reading the loss) is on the device's current
    stream. `begin` and `flush` order it with the streams of this class.

    The caching allocator has a memory pool per stream and reuses freed memory for that stream, in
    the host's order. Collectives and reloads take memory from compute's pool: lowering makes their
    streams wait for all earlier compute, and compute waits for all readers before it frees memory.
    So each of these streams reuses freed memory at once, and no pool holds memory that another
    stream needs.

    Receives wait for no stream; they have their own pool, and `record_stream` tells that pool that
    compute uses its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current = Current(device)
        self.streams = {name: named_stream(device, name) for name in STREAMS}
        self.contexts = {
            name: StreamContext(self.current, made) for name, made in self.streams.items()
        }
        self.arrivals: dict[Hashable, StreamContext] = {}

    def on(self, stream: str) -> AbstractContextManager[object]:
        """The context of the CUDA stream, to be entered only between `begin` and `flush`."""
        return self.contexts[stream]

    def mark(self, stream: str) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.streams[stream])
        return Mark(event)

    def wait(self, stream: str, mark: Mark) -> None:
        """Make the stream wait for the event and its messages; the host does not wait. Messages
        stay in the mark, because another stream may have to wait for them too."""
        with self.on(stream):
            for work in mark.messages:
                work.wait()
            while mark.callbacks:
                mark.callbacks.pop(0)()
        if mark.event is not None:
            self.streams[stream].wait_event(mark.event)

    def synchronize(self, mark: Mark) -> None:
        """Block the calling thread until the device has reached the event."""
        if mark.event is not None:
            mark.event.synchronize()

    def storage_pool(self) -> AbstractContextManager[object]:
        """The context of the compute stream, so that its memory pool provides the storage."""
        return self.on("compute")

    def share(self, stream: str, tensor: torch.Tensor, reader: str = "compute") -> None:
        """Keep the allocator from reusing the memory while `reader` uses the tensor."""
        if stream in UNORDERED:
            tensor.record_stream(self.streams[reader])

    def pending(self, channel: Hashable, work: dist.Work) -> PendingMessage:
        """An event that is recorded when the message is done.

        This is not NCCL's handle, because a held handle keeps the message's memory alive, and here
        only waits decide when memory is freed. Each channel has its own stream for these events, so
        that no message waits for another channel's peer.
        """
        if channel not in self.arrivals:
            made = named_stream(self.device, len(self.arrivals))
            self.arrivals[channel] = StreamContext(self.current, made)
        place, event = self.arrivals[channel], torch.cuda.Event()  # type: ignore[no-untyped-call]
        with place:
            work.wait()
        event.record(place.stream)
        return event

    def begin(self) -> None:
        """Make every stream wait for the current stream; the host does not wait."""
        current = self.current.hold()
        for stream in self.streams.values():
            stream.wait_stream(current)

    def flush(self) -> None:
        """Make the current stream wait for every other stream; the host does not wait."""
        current = self.current.release()
        for stream in self.streams.values():
            current.wait_stream(stream)

    def clock(self) -> Callable[[], float]:
        """A clock of events on the current stream, outside of `begin` and `flush`."""
        current = torch.cuda.current_stream(self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(current)

        def stop() -> float:
            end.record(current)
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return stop


def make_streams(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else Streams()
