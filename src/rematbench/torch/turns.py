"""Steps of several plans in one process, by turns: one model's weights, a new executor each turn.

Clocks and heat are then equal, and weights are drawn once.  The weights change from turn to turn;
a step's work does not.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rematbench.host.gpu_state import GpuState
from rematbench.lowering.lower import lower
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.torch.batch import make_batch, micro_batches
from rematbench.torch.devices import pin_exactly, pinned_peak
from rematbench.torch.executor import Executor
from rematbench.torch.failures import NotFinite, failure
from rematbench.torch.groups import Groups
from rematbench.torch.model import NotExecutable, RankModel, require_executable
from rematbench.torch.parameters import AdamW, Parameter
from rematbench.torch.worker import forget

RULE = AdamW(lr=1e-4)
SEED = 7
MOST_STEPS = 5
TIMED_S = 2.0
"""Seconds of timed steps of a turn: one step if it takes longer, at most MOST_STEPS."""


class Seen(NamedTuple):
    """A turn: seconds of its timed steps and of the host that issued them, seconds of the warm-up
    step, the allocators' peaks (0 on a CPU), and the GPU's state during the warm-up."""

    step_s: tuple[float, ...]
    issue_s: tuple[float, ...]
    warm_s: float
    allocated_bytes: int
    reserved_bytes: int
    pinned_bytes: int
    gpu: GpuState


class Turns:
    """Runs turns on one device; all problems have the same model."""

    def __init__(self, device: torch.device, state: Callable[[], GpuState]) -> None:
        """`state` asks for the GPU's state."""
        torch.set_num_threads(1)  # as in a rank's process
        self.device, self.state = device, state
        self.parameters: dict[str, Parameter] = {}
        if device.type == "cuda":
            pin_exactly()

    def turn(self, problem: Problem, plan: Plan) -> tuple[str, str, dict[str, Any]]:
        """The status of a turn, the reason of a failure, and the fields of `Seen`."""
        try:
            return "ok", "", self._turn(problem, plan)._asdict()
        except Exception as error:
            return *failure(error), {}
        finally:
            self.forget()

    def forget(self) -> None:
        """Release the memory of executors that nobody holds; not the weights'."""
        if self.device.type == "cuda":
            forget(self.device)

    def _turn(self, problem: Problem, plan: Plan) -> Seen:
        executor = self.executor(problem, plan)
        self.forget()  # peaks of drawing weights are no part of training
        stop = executor.streams.clock()
        executor.issue_step()
        state = self.state()  # while the device works
        warm_s = stop()
        steps, issued = [], []
        for _ in range(max(1, min(MOST_STEPS, math.ceil(TIMED_S / warm_s)))):
            start, stop = time.perf_counter(), executor.streams.clock()
            executor.issue_step()
            issued.append(time.perf_counter() - start)
            steps.append(stop())
        if not math.isfinite(float(executor.loss)):
            raise NotFinite(f"the loss is {float(executor.loss)}")
        return Seen(tuple(steps), tuple(issued), warm_s, *self._peaks(executor), state)

    def executor(self, problem: Problem, plan: Plan, kind: type[Executor] = Executor) -> Executor:
        """The executor of a plan on the shared weights, with its batch; NotExecutable for a plan
        whose states are elsewhere."""
        require_executable(problem, plan)
        optimizer = plan.state("optimizer")
        if optimizer.update == "backward" or optimizer.home == "host":
            raise NotExecutable("by turns, plans share states on the device and update them last")
        groups = Groups(problem.layout, problem.system.rank_order, 0)
        model = RankModel(
            problem,
            plan,
            groups.place,
            self.device,
            SEED,
            drawn_here=True,
            parameters=self.parameters,
        )
        self.parameters = model.parameters
        batch = make_batch(problem.workload, problem.layout.global_batch, SEED, 0)
        model.batches = micro_batches(batch, problem.layout, groups.place, self.device)
        return kind(lower(plan, problem).ranks[0], model, groups, optimizer=RULE)

    def _peaks(self, executor: Executor) -> tuple[int, int, int]:
        """Allocated, reserved and pinned bytes."""
        pinned = executor.movers.host.pinned_bytes
        if self.device.type != "cuda":
            return 0, 0, pinned
        return (
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
            max(pinned, pinned_peak()),
        )
