"""Steps of several plans in one process, in turns: one model's weights, and a new executor per
turn.

Clocks and heat are then equal, and weights are drawn once. The weights change from turn to turn,
but the work of a step does not. A step written by hand has turns too. In a pipeline only the first
rank runs, without its neighbours.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rematbench.engine.lowering.lower import lower
from rematbench.host.gpu_state import GpuState
from rematbench.measure.records import Means
from rematbench.measure.torch.plain_step import PlainLoop
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.worlds.torch.batch import make_batch, micro_batches
from rematbench.worlds.torch.case import NotFinite, failure
from rematbench.worlds.torch.devices import limit_memory, pin_requested_size, pinned_peak
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.groups import Groups
from rematbench.worlds.torch.parameters import AdamW, Parameter
from rematbench.worlds.torch.rank_model import NotExecutable, RankModel, require_executable
from rematbench.worlds.torch.single_rank import FirstStageGroups
from rematbench.worlds.torch.streams import make_streams
from rematbench.worlds.torch.worker import choose_options, release_memory

RULE = AdamW(lr=1e-4)
SEED = 7
MAX_STEPS = 5
TIMED_S = 1.0
"""The timed steps of a turn take about this many seconds: at least one step, at most MAX_STEPS.
More turns are worth more than more steps, because rounds differ more than the steps of a turn."""


class TurnResult(NamedTuple):
    """A turn: seconds of each timed step, seconds in which the host issued it, seconds of the
    warm-up step, the allocators' peaks (0 on a CPU), and the GPU's state during the warm-up."""

    step_s: tuple[float, ...]
    issue_s: tuple[float, ...]
    warm_s: float
    allocated_bytes: int
    reserved_bytes: int
    pinned_bytes: int
    gpu: GpuState


class Turns:
    def __init__(self, device: torch.device, state: Callable[[], GpuState]) -> None:
        """`state`: the function that reads the GPU's state."""
        torch.set_num_threads(1)  # a rank's process has one thread
        self.device, self.state = device, state
        self.parameters: dict[str, Parameter] = {}
        self.whose: object = None
        if device.type == "cuda":
            pin_requested_size()

    def turn(
        self, problem: Problem, plan: Plan, means: Means | None = None
    ) -> tuple[str, str, dict[str, Any]]:
        """(status, reason of a failure, fields of `TurnResult`). `means`: run the step written by
        hand with these means of torch, instead of the plan's executor."""
        try:
            return "ok", "", self._turn(problem, plan, means)._asdict()
        except Exception as error:
            return *failure(error), {}
        finally:
            self.release()

    def release(self) -> None:
        """Release the memory of executors that nothing refers to; the weights stay."""
        if self.device.type == "cuda":
            release_memory(self.device)

    def _turn(self, problem: Problem, plan: Plan, means: Means | None) -> TurnResult:
        run: Executor | PlainLoop
        limit_memory(self.device, problem.usable_bytes)
        if self.device.type == "cuda":
            choose_options(problem)
        if means is None:
            run = self.executor(problem, plan)
            pinned = run.movers.host
        else:
            run, pinned = PlainLoop(self._model(problem, plan), RULE, means), None
        self.release()  # peaks of drawing weights do not belong to training
        clock = make_streams(self.device).clock
        stop = clock()
        run.issue_step()
        state = self.state()  # read while the device still runs the step
        warm_s = stop()
        steps, issued = [], []
        for _ in range(max(1, min(MAX_STEPS, math.ceil(TIMED_S / warm_s)))):
            start, stop = time.perf_counter(), clock()
            run.issue_step()
            issued.append(time.perf_counter() - start)
            steps.append(stop())
        if not math.isfinite(float(run.loss)):
            raise NotFinite(f"the loss is {float(run.loss)}")
        peaks = self._peaks(pinned.pinned_bytes if pinned else 0)
        return TurnResult(tuple(steps), tuple(issued), warm_s, *peaks, state)

    def executor(self, problem: Problem, plan: Plan, kind: type[Executor] = Executor) -> Executor:
        """The executor of a plan on the shared weights, with its batch. NotExecutable for a plan
        with an optimizer in host memory or an update in the backward."""
        require_executable(problem, plan)
        optimizer = plan.state("optimizer")
        if optimizer.update == "backward" or optimizer.home == "host":
            raise NotExecutable(
                "plans that run in turns need their states on the device and one "
                "update at the end of a step"
            )
        model = self._model(problem, plan)
        return kind(lower(plan, problem).ranks[0], model, groups_of(problem), optimizer=RULE)

    def _model(self, problem: Problem, plan: Plan) -> RankModel:
        """The model of the first rank, with its batch. It uses the weights of the previous turn if
        that turn had the same model."""
        whose = (problem.workload.model, plan.partition[0])
        if whose != self.whose:
            self.whose, self.parameters = whose, {}
            self.release()
        place = groups_of(problem).place
        model = RankModel(
            problem, plan, place, self.device, SEED, device_weights=True, parameters=self.parameters
        )
        self.parameters = model.parameters
        batch = make_batch(problem.workload, problem.layout.global_batch, SEED, 0)
        model.batches = micro_batches(batch, problem.layout, place, self.device)
        return model

    def _peaks(self, pinned: int) -> tuple[int, int, int]:
        """(allocated, reserved, pinned) bytes; `pinned`: bytes that the executor has pinned."""
        if self.device.type != "cuda":
            return 0, 0, pinned
        return (
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
            max(pinned, pinned_peak()),
        )


def groups_of(problem: Problem) -> Groups:
    """The groups of a single rank, or of a pipeline's first rank without its neighbours."""
    layout, order = problem.layout, problem.system.parallel.rank_order
    if layout.pp > 1:
        return FirstStageGroups(layout, order)
    return Groups(layout, order, 0, experts=problem.workload.model.experts is not None)
