"""Streams as threads: a CPU on which copies and collectives really run beside the host.

These streams find races; they are slow.  Every stream but compute is a thread that works in order,
each piece after a random delay; compute is the host itself.  An event holds when its stream has
reached it.  Memory that a missing wait would read early holds NaN until its work is done.
"""

import queue
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from rematbench.program.action import STREAMS
from rematbench.torch.streams import Mark, Under, host_clock

GIVE_UP_S = 60.0
HOST_STREAMS = ("compute", "pp_send", "pp_recv")


class Flag(Mark):
    """An event of a thread."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reached = threading.Event()


class ThreadStreams:
    """One thread for each stream; `delay_s` is the longest random delay before a piece of work."""

    def __init__(self, seed: int, delay_s: float) -> None:
        self.random, self.delay_s = random.Random(seed), delay_s
        self.failed: list[BaseException] = []
        self.queues: dict[str, queue.SimpleQueue[Callable[[], object] | None]] = {}
        for name in STREAMS:
            if name != "compute":
                self.queues[name] = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(self.queues[name],), daemon=True).start()

    def _work(self, waiting: "queue.SimpleQueue[Callable[[], object] | None]") -> None:
        while (work := waiting.get()) is not None:
            try:
                work()
            except BaseException as error:  # said by flush, on the host
                self.failed.append(error)

    def on(self, stream: str) -> AbstractContextManager[object]:
        """Nothing to switch: `run` names the stream."""
        return nullcontext()

    def run(
        self, stream: str, work: Callable[[], object], fresh: torch.Tensor | None = None
    ) -> None:
        """Queue work on the stream's thread, which delays it at random."""
        if stream == "compute":
            work()
            return
        if fresh is not None and fresh.is_floating_point():
            fresh.fill_(float("nan"))
        delay = self.random.random() * self.delay_s

        def later() -> None:
            time.sleep(delay)
            work()

        self.queues[stream].put(later)

    def mark(self, stream: str) -> Mark:
        """An event after all work queued so far."""
        flag = Flag()
        if stream == "compute":
            flag.reached.set()
        else:
            self.queues[stream].put(flag.reached.set)
        return flag

    def wait(self, stream: str, mark: Mark) -> None:
        """For compute and the message streams (which the host posts) the host waits; for others the
        stream's thread does."""
        mark.finish()
        assert isinstance(mark, Flag)
        if stream in HOST_STREAMS:
            self._reach(mark)
        else:
            self.queues[stream].put(lambda: self._reach(mark))

    def reach(self, mark: Mark) -> None:
        """Hold the thread until the event's stream has reached it."""
        assert isinstance(mark, Flag)
        self._reach(mark)

    def _reach(self, flag: Flag) -> None:
        if not flag.reached.wait(GIVE_UP_S):
            raise TimeoutError(f"an event was not reached within {GIVE_UP_S:g} s")

    def room(self) -> AbstractContextManager[object]:
        """One pool."""
        return nullcontext()

    def lend(self, stream: str, tensor: torch.Tensor) -> None:
        """Nothing to do: queued work holds its tensors."""

    def under_way(self, channel: Hashable, work: dist.Work) -> Under:
        """The handle: the host waits."""
        return work

    def begin(self) -> None:
        """The host issues in order, and every queue is empty."""

    def clock(self) -> Callable[[], float]:
        """Host time; delays are in it."""
        return host_clock()

    def flush(self) -> None:
        """Wait for every thread; raise the first failure."""
        for name in self.queues:
            self._reach_all([self.mark(name)])
        if self.failed:
            raise self.failed[0]

    def _reach_all(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            assert isinstance(mark, Flag)
            self._reach(mark)

    def close(self) -> None:
        """End the threads."""
        for waiting in self.queues.values():
            waiting.put(None)
