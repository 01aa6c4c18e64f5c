"""One rank's steps, whatever the package: first observed ones, then (on GPUs) timed ones."""

import math
import time
from typing import Protocol

import torch
from torch import Tensor

from baselines.common.contract import RankAnswer
from baselines.common.meter import Meter
from rematbench.packages.process import Job
from rematbench.torch.devices import forget_peaks, pinned_peak
from rematbench.torch.failures import NotFinite


class Trainer(Protocol):
    """A package's model and optimizer on one rank, with a batch in hand."""

    def load(self, step: int) -> None:
        """Take a step's batch, on the device."""

    def forward_backward(self, meter: Meter | None) -> None:
        """Every micro-batch of the step, its bytes counted by `meter` if there is one."""

    def loss(self) -> float:
        """The step's mean over all labels that count (a collective)."""

    def gradients(self, *, whole: bool) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Norms of every parameter's gradient and, if asked, on rank 0 the whole gradients in
        float64 on the CPU (a collective)."""

    def update(self) -> None:
        """The optimizer's step."""


def train(trainer: Trainer, job: Job, answer: RankAnswer, meter: Meter, metered: int) -> None:
    """Run a job's steps.  Of observed ones losses and norms are read, and of step `metered` the
    bytes; the timed ones follow, after as many more as the job wants for a warm-up (at least one:
    what compiles itself does so when it is first not observed), and nobody looks at them before
    they are over.

    Raises NotFinite for a loss that is none.
    """
    if job.device == "cuda":
        forget_peaks()
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
    meter.forget()
    if job.device == "cuda":
        _time(trainer, job, answer)


def _time(trainer: Trainer, job: Job, answer: RankAnswer) -> None:
    """Seconds of steps that nobody observes, and the allocator's peaks of all but the warm-up."""
    for number in range(job.warmup + job.timed_steps):
        trainer.load(job.steps + number)
        if number == job.warmup:
            forget_peaks()
        start = now()
        trainer.forward_backward(None)
        trainer.update()
        seconds = now() - start
        if number >= job.warmup:
            answer.step_s.append(seconds)
    answer.allocated_bytes = torch.cuda.max_memory_allocated()
    answer.reserved_bytes = torch.cuda.max_memory_reserved()
    answer.pinned_bytes = pinned_peak()


def now() -> float:
    """Seconds on the host's clock, the device idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
