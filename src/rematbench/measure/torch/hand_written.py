"""Two timings of one GPU: the executor against a hand-written step, and copies beside GEMMs.

The copies go to and from the host. CUDA events time both; times of a CPU mean nothing.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from msgspec import Struct

from rematbench.engine.lowering.lower import lower
from rematbench.measure.torch.plain_step import PlainLoop
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.worlds.torch.batch import make_batch, micro_batches
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.groups import Groups
from rematbench.worlds.torch.model import RankModel
from rematbench.worlds.torch.parameters import AdamW
from rematbench.worlds.torch.storages import host_bytes
from rematbench.worlds.torch.streams import Streams, make_streams

WARM = 2
RULE = AdamW(lr=1e-4)


class StepTimes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of steps that alternate between the executor (keep_all) and the hand-written loop.
    `issue_s`: seconds in which the executor's host issues a step."""

    executor_s: tuple[float, ...]
    by_hand_s: tuple[float, ...]
    issue_s: tuple[float, ...]
    actions: int

    @property
    def ratio(self) -> float:
        """The executor's median step over the hand-written loop's median step."""
        return statistics.median(self.executor_s) / statistics.median(self.by_hand_s)


def step_times(problem: Problem, plan: Plan, device: torch.device, rounds: int) -> StepTimes:
    """The times of `rounds` steps of each kind after a warm-up. The kinds alternate, so that clocks
    and heat are equal. Both train one model: its weights change, its work does not."""
    torch.set_num_threads(1)  # as in a rank's process
    groups = Groups(problem.layout, problem.system.rank_order, 0)
    model = RankModel(problem, plan, groups.place, device, seed=7, drawn_here=True)
    batch = make_batch(problem.workload, problem.layout.global_batch, 7, 0)
    model.batches = micro_batches(batch, problem.layout, groups.place, device)
    executor = Executor(lower(plan, problem).ranks[0], model, groups, optimizer=RULE)
    issued: list[float] = []

    def issue() -> None:
        start = time.perf_counter()
        executor.issue_step()
        issued.append(time.perf_counter() - start)

    kinds: tuple[Callable[[], object], ...] = (issue, PlainLoop(model, RULE).issue_step)
    times: list[list[float]] = [[], []]
    for _ in range(WARM + rounds):
        for run, seconds in zip(kinds, times, strict=True):
            stop = executor.streams.clock()
            run()
            seconds.append(stop())
    own, plain = (tuple(seconds[WARM:]) for seconds in times)
    return StepTimes(
        executor_s=own,
        by_hand_s=plain,
        issue_s=tuple(issued[WARM:]),
        actions=len(executor.actions),
    )


class CopyTimes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of GEMMs and of one copy each way: alone, both copies together, and all together."""

    nbytes: int
    products: int
    size: int
    compute_s: float
    d2h_s: float
    h2d_s: float
    copies_s: float
    together_s: float

    @property
    def slowdown(self) -> float:
        """The seconds of all together over the longest alone: 1 where no work slows other work."""
        return self.together_s / max(self.compute_s, self.d2h_s, self.h2d_s)


def copy_times(device: torch.device, size: int, nbytes: int, rounds: int = 5) -> CopyTimes:
    """Seconds of square GEMMs and of pinned copies of `nbytes` both ways, about equally long."""
    streams = make_streams(device)
    a = torch.randn(size, size, device=device).to(torch.bfloat16)
    here = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    there = [host_bytes(nbytes, pinned=device.type == "cuda") for _ in range(2)]
    work: dict[str, Callable[[], object]] = {
        "d2h": partial(there[0].copy_, here[0], non_blocking=True),
        "h2d": partial(here[1].copy_, there[1], non_blocking=True),
        "compute": lambda: a @ a,
    }
    timed = partial(_timed, streams, work)
    for name in work:
        timed({name: 1})
    one, copy = timed({"compute": 4}) / 4, timed({"d2h": 1})
    products = max(1, min(10_000, round(copy / one)))
    every = {"compute": products, "d2h": 1, "h2d": 1}

    def median(*names: str) -> float:
        return statistics.median(timed({n: every[n] for n in names}) for _ in range(rounds))

    return CopyTimes(
        nbytes=nbytes,
        products=products,
        size=size,
        compute_s=median("compute"),
        d2h_s=median("d2h"),
        h2d_s=median("h2d"),
        copies_s=median("d2h", "h2d"),
        together_s=median("d2h", "h2d", "compute"),
    )


def _timed(streams: Streams, work: dict[str, Callable[[], object]], times: dict[str, int]) -> float:
    """Seconds of pieces of work, each kind of work on its own stream."""
    stop = streams.clock()
    at_once(streams, work, times)
    return stop()


def at_once(
    streams: Streams, work: Mapping[str, Callable[[], object]], times: Mapping[str, int]
) -> None:
    """Issue pieces of work, each kind so many times and on its own stream."""
    streams.begin()
    for name, count in times.items():
        place: AbstractContextManager[object] = streams.on(name)
        with place:
            for _ in range(count):
                work[name]()
    streams.flush()
