"""Streams as threads: on a CPU, copies and collectives then really run concurrently with the host.

These streams find races; they are slow. Every stream but compute is a thread that works in order
and begins each piece of work after a random delay; the host itself is the compute stream. An event
is complete when its stream has reached it. Memory that a missing wait would read too early holds
NaN until the work that fills it is done.
"""

import queue
import random
import threading
import time
from collections.abc import Callable

import torch

from rematbench.engine.program.action import STREAMS
from rematbench.worlds.torch.streams import Mark, Streams

GIVE_UP_S = 60.0
HOST_STREAMS = ("compute", "pp_send", "pp_recv")
Work = Callable[[], object]


class Flag(Mark):
    """An event that a thread reaches."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reached = threading.Event()


class ThreadStreams(Streams):
    """One thread per stream; `delay_s` is the longest random delay before a piece of work. The
    threads run from `begin` to `flush`."""

    def __init__(self, seed: int, delay_s: float) -> None:
        self.random, self.delay_s = random.Random(seed), delay_s
        self.errors: list[BaseException] = []
        self.queues: dict[str, queue.SimpleQueue[Work | None]] = {
            name: queue.SimpleQueue() for name in STREAMS if name != "compute"
        }

    def _work(self, waiting: "queue.SimpleQueue[Work | None]") -> None:
        while (work := waiting.get()) is not None:
            try:
                work()
            except BaseException as error:  # flush raises the error on the host
                self.errors.append(error)

    def run(self, stream: str, work: Work, fresh: torch.Tensor | None = None) -> None:
        """Queue work on the stream's thread, which delays the work at random."""
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
        """An event that completes after all work queued so far."""
        flag = Flag()
        if stream == "compute":
            flag.reached.set()
        else:
            self.queues[stream].put(flag.reached.set)
        return flag

    def wait(self, stream: str, mark: Mark) -> None:
        """Make a stream wait for an event. For compute and the message streams (which the host
        posts) the host waits; for other streams their thread waits."""
        mark.finish()
        if stream in HOST_STREAMS:
            self.synchronize(mark)
        else:
            self.queues[stream].put(lambda: self.synchronize(mark))

    def synchronize(self, mark: Mark) -> None:
        """Hold the calling thread until the event is complete."""
        assert isinstance(mark, Flag)
        if not mark.reached.wait(GIVE_UP_S):
            raise TimeoutError(f"an event was not reached within {GIVE_UP_S:g} s")

    def begin(self) -> None:
        """Start the threads."""
        for waiting in self.queues.values():
            threading.Thread(target=self._work, args=(waiting,), daemon=True).start()

    def flush(self) -> None:
        """Wait for every thread and end it; raise the first error."""
        for name in self.queues:
            self.synchronize(self.mark(name))
            self.queues[name].put(None)
        if self.errors:
            raise self.errors[0]
