"""Streams and events: real ones on CUDA, issue order on a CPU; the executor's code is the same."""

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist

from rematbench.program.action import STREAMS


class Under(Protocol):
    """A message under way: torch's handle, or an event that is recorded when it is done."""

    def wait(self) -> object:
        """Hold the host (gloo) or the current stream (CUDA) until the message is done."""


class Mark:
    """A recorded event: a CUDA event, and messages that must have arrived."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event
        self.works: list[Under] = []
        self.then: list[Callable[[], None]] = []

    def finish(self) -> None:
        """Wait for the messages (on CUDA the current stream waits, not the host)."""
        while self.works:
            self.works.pop(0).wait()
        while self.then:
            self.then.pop(0)()


class Streams(Protocol):
    """What the executor asks of a device's streams."""

    def on(self, stream: str) -> AbstractContextManager[object]:
        """Issue on a stream."""

    def mark(self, stream: str) -> Mark:
        """An event after all work issued so far on a stream."""

    def wait(self, stream: str, mark: Mark) -> None:
        """Hold a stream until an event."""

    def reach(self, mark: Mark) -> None:
        """Hold the calling thread until an event."""

    def room(self) -> AbstractContextManager[object]:
        """Take the memory of a storage that outlives its action."""

    def lend(self, stream: str, tensor: torch.Tensor) -> None:
        """Compute will use (and free) a tensor that another stream made."""

    def run(
        self, stream: str, work: Callable[[], object], fresh: torch.Tensor | None = None
    ) -> None:
        """Issue tensor work; the host has handled its storages and names already.  `fresh`: memory
        that no stream may read before the work is done."""

    def under_way(self, channel: Hashable, work: dist.Work) -> Under:
        """The handle to wait on for a message of a channel, whose messages go one by one."""

    def begin(self) -> None:
        """Order every stream's step behind the work that was issued outside of them."""

    def flush(self) -> None:
        """Order work issued outside next behind all streams; raise the first failure."""

    def clock(self) -> Callable[[], float]:
        """Start a clock; calling the result gives the seconds since."""


def host_clock() -> Callable[[], float]:
    """Seconds of the host's clock since now."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


class HostStreams:
    """Streams of a CPU: an action is done when issued; only messages stay under way."""

    def on(self, stream: str) -> AbstractContextManager[object]:
        """Nothing to switch."""
        return nullcontext()

    def mark(self, stream: str) -> Mark:
        """Nothing to record."""
        return Mark(None)

    def wait(self, stream: str, mark: Mark) -> None:
        """The host waits for messages."""
        mark.finish()

    def reach(self, mark: Mark) -> None:
        """Issued is done."""

    def room(self) -> AbstractContextManager[object]:
        """One stream only."""
        return nullcontext()

    def lend(self, stream: str, tensor: torch.Tensor) -> None:
        """One stream only."""

    def run(
        self, stream: str, work: Callable[[], object], fresh: torch.Tensor | None = None
    ) -> None:
        """Done at once."""
        work()

    def under_way(self, channel: Hashable, work: dist.Work) -> Under:
        """The handle: the host waits."""
        return work

    def begin(self) -> None:
        """One stream only."""

    def flush(self) -> None:
        """Nothing is under way."""

    def clock(self) -> Callable[[], float]:
        """Host time."""
        return host_clock()


UNORDERED = frozenset({"pp_recv"})
"""Streams that wait for nothing: their storages must not lie where compute may still work."""


class Current:
    """The stream that a rank issues on, from a step's begin to its end.  torch's own context asks
    for the device and for the current stream on every entry, which costs ten times the switch;
    this class knows the stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams: list[torch.cuda.Stream] = []  # the innermost last

    def hold(self) -> torch.cuda.Stream:
        """Return the current stream; until `release` only this object switches."""
        self.streams = [torch.cuda.current_stream(self.device)]
        return self.streams[0]

    def release(self) -> torch.cuda.Stream:
        """Return the current stream; others may switch from now on."""
        return self.streams.pop() if self.streams else torch.cuda.current_stream(self.device)

    def enter(self, stream: torch.cuda.Stream) -> None:
        """Issue on a stream."""
        if not self.streams:
            self.hold()
        if stream is not self.streams[-1]:
            torch.cuda.set_stream(stream)
        self.streams.append(stream)

    def leave(self) -> None:
        """Return to the stream before the last `enter`."""
        left = self.streams.pop()
        if left is not self.streams[-1]:
            torch.cuda.set_stream(self.streams[-1])


class On(AbstractContextManager[object]):
    """A context within which work goes to one stream."""

    def __init__(self, current: Current, stream: torch.cuda.Stream) -> None:
        self.current, self.stream = current, stream

    def __enter__(self) -> None:
        self.current.enter(self.stream)

    def __exit__(self, *_: object) -> None:
        self.current.leave()


MADE: dict[tuple[torch.device, Hashable], torch.cuda.Stream] = {}
"""This process's streams, by device and name."""


def own_stream(device: torch.device, name: Hashable) -> torch.cuda.Stream:
    """A device's stream of a name, one for the whole process: torch hands out 32 in turn, so the
    compute stream of one executor could be the copy stream of another."""
    if (device, name) not in MADE:
        MADE[device, name] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return MADE[device, name]


class CudaStreams:
    """One CUDA stream for each named stream; events instead of synchronisation.  Work from outside
    (batches, zeroed gradients, reading the loss) is on the device's current stream, which is not
    ordered with these: `begin` and `flush` order it.

    The caching allocator has a pool per stream and reuses freed memory for that stream, in the
    host's order.  Collectives and reloads take memory from compute's pool: lowering makes their
    streams wait for all compute issued before, and compute waits for every reader before it frees.
    So any of these streams reuses freed memory at once, and no pool holds what another needs.
    Receives wait for nothing; they have a pool of their own, and `record_stream` tells it that
    compute uses its memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current = Current(device)
        self.streams = {name: own_stream(device, name) for name in STREAMS}
        self.contexts = {name: On(self.current, made) for name, made in self.streams.items()}
        self.arrivals: dict[Hashable, On] = {}

    def on(self, stream: str) -> AbstractContextManager[object]:
        """Issue on the CUDA stream; between `begin` and `flush` only."""
        return self.contexts[stream]

    def mark(self, stream: str) -> Mark:
        """An event at the stream's end."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.streams[stream])
        return Mark(event)

    def wait(self, stream: str, mark: Mark) -> None:
        """Make the stream wait for the event and its messages; the host does not wait.  Messages
        stay in the mark: another stream may have to wait for them too."""
        with self.on(stream):
            for work in mark.works:
                work.wait()
            while mark.then:
                mark.then.pop(0)()
        if mark.event is not None:
            self.streams[stream].wait_event(mark.event)

    def reach(self, mark: Mark) -> None:
        """Hold the thread until the device has reached the event."""
        if mark.event is not None:
            mark.event.synchronize()

    def room(self) -> AbstractContextManager[object]:
        """Memory from compute's pool."""
        return self.on("compute")

    def lend(self, stream: str, tensor: torch.Tensor) -> None:
        """Keep the allocator from reusing the memory until compute is past the tensor."""
        if stream in UNORDERED:
            tensor.record_stream(self.streams["compute"])

    def run(
        self, stream: str, work: Callable[[], object], fresh: torch.Tensor | None = None
    ) -> None:
        """Issue on the current stream, which `on` has set."""
        work()

    def under_way(self, channel: Hashable, work: dist.Work) -> Under:
        """An event in the handle's place.  NCCL's handle keeps the message's memory while anything
        holds the handle, but waits decide here when memory is free.  Each channel has a stream for
        its events, so that no message waits for another's peer."""
        if channel not in self.arrivals:
            made = own_stream(self.device, len(self.arrivals))
            self.arrivals[channel] = On(self.current, made)
        place, event = self.arrivals[channel], torch.cuda.Event()  # type: ignore[no-untyped-call]
        with place:
            work.wait()
        event.record(place.stream)
        return event

    def begin(self) -> None:
        """Make every stream wait for the current one; the host does not wait."""
        current = self.current.hold()
        for stream in self.streams.values():
            stream.wait_stream(current)

    def flush(self) -> None:
        """Make the current stream wait for every other; the host does not wait."""
        current = self.current.release()
        for stream in self.streams.values():
            current.wait_stream(stream)

    def clock(self) -> Callable[[], float]:
        """Events on the current stream, around `begin` and `flush`."""
        current = torch.cuda.current_stream(self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record(current)

        def stop() -> float:
            end.record(current)
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return stop


def make_streams(device: torch.device) -> Streams:
    """Streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
