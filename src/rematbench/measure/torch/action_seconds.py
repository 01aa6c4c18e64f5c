"""Seconds of every action of a step on its stream, to see where a step's time goes.

A clock is read before and after each action, on a GPU by the stream itself.  The seconds include
the gaps between the action's kernels.  A stream waits for another stream only in a WAIT.
"""

import time
from collections.abc import Iterable
from typing import NamedTuple

import torch

from rematbench.engine.program.action import Action, Kind
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.streams import CudaStreams, Streams, stamp

WITHOUT_WORK = (Kind.FREE, Kind.ALLOC, Kind.EVENT)
Stamp = torch.cuda.Event | float


class TimedAction(NamedTuple):
    action: Action
    seconds: float


def now(streams: Streams, stream: str) -> Stamp:
    """The time after all work issued so far on a stream: an event of CUDA, or the host's clock."""
    if isinstance(streams, CudaStreams):
        return stamp(streams.streams[stream])
    return time.perf_counter()


def between(start: Stamp, end: Stamp) -> float:
    """Seconds between two times of one stream, which the stream has reached."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return float(start.elapsed_time(end)) / 1e3


class TimedExecutor(Executor):
    """An executor that reads a clock around every action."""

    def timed_step(self) -> tuple[float, list[TimedAction]]:
        """Run a step. The result has its seconds, and its actions with their seconds in issue
        order."""
        self.read: list[tuple[Action, Stamp, Stamp]] = []
        stop = self.streams.clock()
        self.issue_step()
        whole = stop()  # waits for the device
        return whole, [TimedAction(action, between(start, end)) for action, start, end in self.read]

    def _act(self, action: Action, micro_batch: int, chunk: int) -> None:
        if action.kind in WITHOUT_WORK:
            super()._act(action, micro_batch, chunk)
            return
        start = now(self.streams, action.stream)
        super()._act(action, micro_batch, chunk)
        self.read.append((action, start, now(self.streams, action.stream)))


class Key(NamedTuple):
    """Actions that are counted together: the kind of unit (E: embedding, L: layer, H: head), the
    operator, the kind of action, and the stream."""

    unit: str
    op: str
    kind: str
    stream: str


def by_key(actions: Iterable[TimedAction]) -> dict[Key, list[TimedAction]]:
    found: dict[Key, list[TimedAction]] = {}
    for timed in actions:
        action = timed.action
        key = Key(action.part.letter, action.op, action.kind.value, action.stream)
        found.setdefault(key, []).append(timed)
    return found
