"""Repeats of one call on a device: by CUDA events behind a busy device, or by the host's clock."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from rematbench.worlds.torch.streams import host_clock, make_streams, stamp

MIN_REPEATS, MAX_REPEATS = 7, 60
"""The smallest number of repeats (where time is left), and the largest."""
STEADY = 0.01
"""Spread (interquartile range over median) at which repeats end."""
SAMPLE_S = 1e-3
"""A sample has as many calls as take about this long, at most MAX_CALLS."""
MAX_CALLS = 100
BATCH_S = 0.05
"""Seconds of a batch on a device that is kept busy; a batch has at most MAX_BATCH_CALLS calls,
which fit a GPU's queue."""
MAX_BATCH_CALLS = 400
BLOCKER = 4096
"""Width of the square product that keeps the device busy while the host issues a sample."""
MAX_BLOCKERS = 200

Call = Callable[[], object]


class Repeats:
    """Samples of calls on one device.  On CUDA a sample starts behind products that take longer
    than the host takes to issue the sample, so that no launch is timed.  On a CPU the host's clock
    is used."""

    def __init__(self, device: torch.device) -> None:
        torch.set_num_threads(1)  # as in a rank's process
        self.device = device
        self.cuda, self.streams = device.type == "cuda", make_streams(device)
        if self.cuda:
            self.wide = torch.randn(BLOCKER, BLOCKER, device=device).to(torch.bfloat16)
            self.block_s = min(self._events(lambda: self.wide @ self.wide, 1, 0) for _ in range(5))

    def wait(self) -> None:
        """Hold the host until the device is idle."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def of_device(self, call: Call, until: float) -> list[float]:
        """Return the seconds on the device of a call that has run before, one value per sample,
        until `until` (monotonic)."""
        issued = host_clock()
        call()
        issue_s = issued()
        self.wait()
        once = issued()
        calls = max(1, min(MAX_CALLS, round(SAMPLE_S / once)))
        if not self.cuda:
            return repeated(lambda: self._host(call, calls), until)
        need = math.ceil(1.5 * issue_s * calls / self.block_s)
        return repeated(lambda: self._events(call, calls, min(MAX_BLOCKERS, need)), until)

    def of_busy_device(self, call: Call, for_s: float) -> list[float]:
        """Seconds of a call that a device repeats for `for_s` seconds: one number for each batch of
        calls in the second half.  Each batch is issued while the previous batch runs."""
        calls = max(1, min(MAX_BATCH_CALLS, round(BATCH_S / max(self._events(call, 1, 0), 1e-6))))
        current = torch.cuda.current_stream(self.device)
        ends, begun = [stamp(current)], time.monotonic()
        while time.monotonic() - begun < for_s:
            for _ in range(calls):
                call()
            ends.append(stamp(current))
            ends[-2].synchronize()
        ends[-1].synchronize()
        taken = [one.elapsed_time(two) / 1e3 / calls for one, two in pairwise(ends)]
        return taken[len(taken) // 2 :]

    def of_host(self, call: Call, calls: int, until: float) -> list[float]:
        """Seconds in which the host makes a call, with an idle device at the start of a sample."""
        self._host(call, calls)
        return repeated(lambda: self._host(call, calls), until)

    def _events(self, call: Call, calls: int, blockers: int) -> float:
        for _ in range(blockers):
            torch.mm(self.wide, self.wide)
        stop = self.streams.clock()
        for _ in range(calls):
            call()
        return stop() / calls

    def _host(self, call: Call, calls: int) -> float:
        self.wait()
        took = host_clock()
        for _ in range(calls):
            call()
        seconds = took() / calls
        self.wait()
        return seconds


def repeated(sample: Callable[[], float], until: float) -> list[float]:
    """Return samples until they are steady or the time ends, but at least one.  The first sample
    only warms up and is dropped."""
    sample()
    found = [sample()]
    while len(found) < MAX_REPEATS and time.monotonic() < until:
        if len(found) >= MIN_REPEATS and spread_of(found) < STEADY:
            break
        found.append(sample())
    return found


def spread_of(seconds: Sequence[float]) -> float:
    """The interquartile range over the median; infinite for fewer than two values."""
    if len(seconds) < 2:
        return float("inf")
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle if middle else float("inf")
