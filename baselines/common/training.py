"""The steps of one rank for every package: observed steps first, then (on GPUs) timed steps."""

import math
import time
from typing import Protocol

import torch
from torch import Tensor

from baselines.common.interface import RankAnswer
from baselines.common.meter import Meter
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.torch.case import NotFinite
from rematbench.worlds.torch.devices import pinned_peak, reset_peaks


class Trainer(Protocol):
    """A package's model and optimizer on one rank, with the batch of a step."""

    def load(self, step: int) -> None:
        """Load the batch of a step onto the device."""

    def forward_backward(self, meter: Meter | None) -> None:
        """Run forward and backward of every micro-batch; `meter`, if given, counts the bytes."""

    def loss(self) -> float:
        """The step's mean loss over all labels that are not ignored (a collective)."""

    def gradients(self, *, whole: bool) -> tuple[dict[str, float], dict[str, Tensor]]:
        """The norm of every parameter's gradient, and if `whole` the gradients too (a collective).
        The whole gradients are on rank 0, in float64 on the CPU."""

    def update(self) -> None:
        """Run the optimizer's step."""


def train(
    trainer: Trainer, job: PackageJob, answer: RankAnswer, meter: Meter, metered: int
) -> None:
    """Run a job's steps: observed steps first, then timed steps.

    Losses and norms are read in observed steps; bytes are counted in step `metered`. At least one
    warm-up step runs before the timed steps, because a package may compile in its first unobserved
    step. No value is read during the timed steps.

    Raises NotFinite for a loss that is not finite.
    """
    if job.device == "cuda":
        reset_peaks()
    for step in range(job.steps):
        trainer.load(step)
        trainer.forward_backward(meter if step == metered else None)
        loss = trainer.loss()
        if not math.isfinite(loss):
            raise NotFinite(f"loss of step {step} is {loss}")
        answer.losses.append(loss)
        norms, whole = trainer.gradients(whole=job.gradients and step == 0)
        answer.gradient_norms.append(norms)
        answer.gradients = whole or answer.gradients
        trainer.update()
    answer.activation_peak_bytes = meter.device_peak_bytes
    answer.host_peak_bytes = meter.host_peak_bytes
    meter.release_states()
    if job.device == "cuda":
        _time(trainer, job, answer)


def _time(trainer: Trainer, job: PackageJob, answer: RankAnswer) -> None:
    """Measure the seconds of timed steps, and the allocator's peaks during them."""
    for number in range(job.warmup + job.timed_steps):
        trainer.load(job.steps + number)
        if number == job.warmup:
            reset_peaks()
        start = synchronized_time()
        trainer.forward_backward(None)
        trainer.update()
        seconds = synchronized_time() - start
        if number >= job.warmup:
            answer.step_s.append(seconds)
    answer.allocated_bytes = torch.cuda.max_memory_allocated()
    answer.reserved_bytes = torch.cuda.max_memory_reserved()
    answer.pinned_bytes = pinned_peak()


def synchronized_time() -> float:
    """Seconds on the host's clock, read after the device has become idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
