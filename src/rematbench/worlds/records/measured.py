"""The numbers that a traced or executed run measures: losses, gradient norms, bytes and seconds per
rank, and the speed of the steps. They are part of a Record, which contains no tensors.

Records hold no CPU seconds, because CPU seconds do not measure performance.
"""

import math
import re
import statistics
from collections.abc import Mapping, Sequence

from msgspec import Struct

from rematbench.evaluate.evaluation import speed
from rematbench.inputs.cluster import Cluster
from rematbench.problem import Problem

TIMED_STEPS = 3
BOUNDS = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2}
"""Norm-wise relative errors that rounding alone may cause (docs/executed.md, the gradient law)."""
OF_CUDA = ("allocated_bytes", "reserved_bytes", "pinned_bytes")
"""Bytes of torch's allocators for a rank: on the device, and pinned on the host."""


class Engine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The package that ran instead of rematbench's executor.  `label`: its name in tables; `stack`:
    its packages by version; `shim`: the active parts of rematbench's shim; `kernels`: the chosen
    kernels, if the package offers a choice; `backend`: the backend of torch.distributed."""

    label: str
    stack: dict[str, str]
    shim: tuple[str, ...] = ()
    kernels: dict[str, str] = {}
    device: str = "cpu"
    backend: str = ""


class RankMeasured(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The numbers of one process: its rank in the job, its pipeline rank, its bytes and seconds.

    `activation_peak_bytes`: the peak of live storages that are not states, also inside operators;
    `state_bytes`: parameters, gradients, optimizer states. On GPUs only: `step_s` of the timed
    steps, the allocator's `allocated_bytes` and `reserved_bytes`, and `pinned_bytes` (host memory
    that torch holds pinned, which may exceed the requested memory).

    Only rematbench's executor fills the other fields, because a package has no actions: activation
    bytes at action boundaries, measured and from the issue-order ledger (they differ after
    `differing_actions` of `actions`; 0 is right), and the simulated peak of the same saved tensors
    with the states and kernels of the torch runtime, whatever the problem's stack. `offload_bytes`
    and `recompute_flop` are for one step.
    """

    rank: int
    pp: int
    activation_peak_bytes: int
    state_bytes: int
    host_peak_bytes: int
    host_state_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    pinned_bytes: int = 0
    step_s: tuple[float, ...] = ()
    actions: int = 0
    differing_actions: int = 0
    boundary_peak_bytes: int = 0
    ledger_boundary_peak_bytes: int = 0
    ledger_host_peak_bytes: int = 0
    simulated_peak_bytes: int = 0
    simulated_state_bytes: int = 0
    offload_bytes: int = 0
    recompute_flop: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """Peak device bytes: activations and states."""
        return self.activation_peak_bytes + self.state_bytes

    @property
    def host_bytes(self) -> int:
        """Peak host bytes: activations and states."""
        return self.host_peak_bytes + self.host_state_bytes

    @property
    def peak_error(self) -> float:
        """(measured - simulated) / simulated peak device bytes, both with states."""
        return self.peak_bytes / self.simulated_peak_bytes - 1.0


def relative(error: float, size: float) -> float:
    """`error` / `size`; infinite if only the size is zero."""
    return error / size if size else math.inf if error else 0.0


def largest(errors: Sequence[float]) -> float:
    """The largest error; NaN if any error is NaN (which `max` would miss)."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def whole_norms(norms: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """The norm of each step's whole gradient, from the norms of its parameters' gradients."""
    return tuple(sum(v * v for v in step.values()) ** 0.5 for step in norms)


class Comparison(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The comparison of a run with another method on the same problem and batches. Lossless means:
    bitwise equal, or the losses and every parameter's gradient (norm-wise) differ by at most
    `bound` over all steps. In bf16 and fp32 (`first_only`) only the first step's gradients count:
    AdamW turns the rounding of a small gradient into a change of its weight, so later gradients
    belong to different weights (they are still reported)."""

    against: str
    bitwise: bool
    gradient_error: float
    loss_error: float
    bound: float
    first_gradient_error: float | None = None
    first_only: bool = False

    @property
    def judged_first(self) -> bool:
        return self.first_only and self.first_gradient_error is not None

    @property
    def judged_error(self) -> float:
        """The gradient error that decides whether the run is lossless."""
        first = self.first_gradient_error
        return first if self.first_only and first is not None else self.gradient_error

    @property
    def lossless(self) -> bool:
        """Whether the two runs differ by no more than rounding."""
        errors = (self.judged_error, self.loss_error)
        return self.bitwise or all(error <= self.bound for error in errors)

    @property
    def not_finite(self) -> str:
        """NaN or infinite errors, which no record can hold, in words; empty if all are finite."""
        errors = {
            "gradient error": self.gradient_error,
            "first gradient error": self.first_gradient_error or 0.0,
            "loss error": self.loss_error,
        }
        wrong = [f"{what} {error}" for what, error in errors.items() if not math.isfinite(error)]
        return f"NotFinite: against {self.against} {', '.join(wrong)}" if wrong else ""


class Measured(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The numbers of a run. For each observed step: the loss and the norm of the whole gradient,
    and in `parameter_norms` the norm of each parameter's gradient before the update (empty if not
    requested). For each rank: its bytes; a traced run has only the traced rank, a training run has
    no ranks. On GPUs, the timed steps follow `warmup_steps` steps, which include the observed
    steps; timed steps are not observed. `linear_updates`: the updates were linear in the gradients
    (`execute` and baselines use AdamW's)."""

    losses: tuple[float, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    parameter_norms: tuple[dict[str, float], ...] = ()
    ranks: tuple[RankMeasured, ...] = ()
    comparison: Comparison | None = None
    warmup_steps: int = 0
    linear_updates: bool = False

    @property
    def steps(self) -> int:
        """The number of observed steps; a traced run has one, without a loss."""
        return len(self.losses) or 1

    @property
    def step_s(self) -> tuple[float, ...]:
        """Seconds of the slowest rank in each timed step; empty on CPUs."""
        return tuple(map(max, zip(*(rank.step_s for rank in self.ranks), strict=True)))

    @property
    def differing_actions(self) -> int:
        """The number of actions of all ranks after which live bytes disagree with the ledger."""
        return sum(rank.differing_actions for rank in self.ranks)

    @property
    def fullest(self) -> RankMeasured:
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    def first_errors(self, reference: "Measured") -> tuple[float, float]:
        """The relative differences of the first loss and of the first gradient norm from those of
        `reference`. Later steps are left out, because AdamW turns the rounding of a small gradient
        into a change of its weight."""
        pairs = ((self.losses, reference.losses), (self.gradient_norms, reference.gradient_norms))
        loss, norm = (relative(abs(own[0] - its[0]), abs(its[0])) for own, its in pairs)
        return loss, norm


class MeasuredSpeed(Struct, frozen=True, kw_only=True):
    """The speed of a run: `step_s` is the median of its timed `steps`, and the rates follow from
    this median.  MFU are fractions of the cluster's dense bf16 peak (`peak` names the peak); they
    are None, with the reason in `no_mfu`, if the run used a different GPU than the cluster has."""

    steps: int
    step_s: float
    step_min_s: float
    step_max_s: float
    tokens_per_s_per_gpu: float
    mfu_causal: float | None = None
    mfu_dense: float | None = None
    peak: str = ""
    no_mfu: str = ""


def measured_speed(problem: Problem, step_s: Sequence[float], device: str) -> MeasuredSpeed:
    """The speed of a run on `device` (torch's name of the GPU). `step_s` has the seconds of the
    slowest rank in each timed step, and must not be empty."""
    median = statistics.median(step_s)
    found, cluster = speed(problem, median), problem.cluster
    known = has_peak_of(cluster, device)
    peak = f"of {cluster.peak_flop_per_s / 1e12:g} TFLOP/s, {cluster.gpu}"
    other = (
        f"no MFU: the peak of cluster {cluster.name} is for {cluster.gpu}, but this ran on {device}"
    )
    return MeasuredSpeed(
        steps=len(step_s),
        step_s=median,
        step_min_s=min(step_s),
        step_max_s=max(step_s),
        tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
        mfu_causal=found.mfu_causal if known else None,
        mfu_dense=found.mfu_dense if known else None,
        peak=peak if known else "",
        no_mfu="" if known else other,
    )


def has_peak_of(cluster: Cluster, device: str) -> bool:
    """Whether `device`, torch's name of a GPU, is the GPU of the cluster: the name contains the
    model number of the cluster's GPU (H800 of H800-SXM5-80GB).  False for a CPU cluster."""
    if cluster.generation == "cpu":
        return False
    model = next(iter(_numbered(cluster.gpu)), cluster.gpu.upper())
    return model in (*_numbered(device), device.upper())


def _numbered(name: str) -> list[str]:
    """The words of a name that contain a digit, in upper case."""
    return [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if re.search(r"\d", word)]
