"""The numbers that a traced or executed run showed, ours or a package's: losses, gradient norms,
bytes and seconds per rank.  Part of a Record; tensors are no part of it.

CPU seconds are never performance, so they are in no record.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

TIMED_STEPS = 3
"""Steps that a run on GPUs times unless told otherwise."""
LEARNING_RATE = 1e-3
"""Of AdamW in the long training runs whose loss curves are kept."""
BOUNDS = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2}
"""Norm-wise errors that rounding alone may cause (DESIGN.md, the gradient law)."""
OF_CUDA = ("allocated_bytes", "reserved_bytes", "pinned_bytes")
"""What torch's allocators say of a rank, on the device and pinned on the host."""


class Engine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ran instead of our executor: `label` is what a table may call it; `stack` its packages
    by version; `shim` the parts of our shim that were active; `kernels` which kernels stood where
    the package offers a choice; `backend` that of torch.distributed."""

    label: str
    stack: dict[str, str]
    shim: tuple[str, ...] = ()
    kernels: dict[str, str] = {}
    device: str = "cpu"
    backend: str = ""


class RankMeasured(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One process: its number in the job and its pipeline rank.

    `activation_peak_bytes`: live storages that are not states, at their largest, those inside an
    operator too; `state_bytes`: parameters, gradients, optimizer.  On GPUs only: seconds of the
    timed steps, `allocated_bytes`, `reserved_bytes` (the allocator's) and `pinned_bytes` (what
    torch holds pinned, which may be more than is asked for).

    Of our executor only, as a package has no actions: bytes of activations at action boundaries
    beside the issue-order ledger's (`differing_actions` of `actions` disagree; the twin law wants
    none), and the simulated total of the same saved tensors with the torch runtime's states and
    kernels, whatever the problem's stack.  `offload_bytes` and `recompute_flop` are of one step.
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
        """Peak on the device, states included."""
        return self.activation_peak_bytes + self.state_bytes

    @property
    def host_bytes(self) -> int:
        """Peak on the host, states included."""
        return self.host_peak_bytes + self.host_state_bytes

    @property
    def peak_error(self) -> float:
        """Measured total peak less the simulated one, as a fraction of the latter."""
        return self.peak_bytes / self.simulated_peak_bytes - 1.0


def relative(error: float, size: float) -> float:
    """An error as a fraction; infinite where the size is zero and the error is not."""
    return error / size if size else math.inf if error else 0.0


def largest(errors: Sequence[float]) -> float:
    """The largest of some errors, NaN if one is (which `max` passes over)."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def whole_norms(norms: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """The norm of each step's whole gradient, from those of its parameters."""
    return tuple(sum(v * v for v in step.values()) ** 0.5 for step in norms)


class Comparison(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Against another method on the same problem and batches: lossless means bitwise equal, or
    every parameter's gradient (norm-wise) and the losses within `bound` over the steps.  In bf16
    only the first step's gradient is held to it: AdamW turns the rounding of a small gradient into
    a change of its weight, so later gradients are those of other weights (reported all the same).
    """

    against: str
    bitwise: bool
    gradient_error: float
    loss_error: float
    bound: float
    first_gradient_error: float | None = None
    first_only: bool = False

    @property
    def lossless(self) -> bool:
        """Whether nothing but rounding differs."""
        first = self.first_gradient_error
        error = first if self.first_only and first is not None else self.gradient_error
        return self.bitwise or (error <= self.bound and self.loss_error <= self.bound)

    @property
    def not_finite(self) -> str:
        """Errors that are NaN or infinite, which no record can hold; nothing if all are numbers."""
        errors = {
            "gradient error": self.gradient_error,
            "first gradient error": self.first_gradient_error or 0.0,
            "loss error": self.loss_error,
        }
        wrong = [f"{what} {error}" for what, error in errors.items() if not math.isfinite(error)]
        return f"NotFinite: against {self.against} {', '.join(wrong)}" if wrong else ""


class Measured(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The numbers of a run, whatever ran it: per observed step the loss and the norm of the whole
    gradient (`parameter_norms`: of each parameter, before the update; empty if not asked for), per
    rank its bytes.  A traced run has the one rank it followed, a training run none.  On GPUs timed
    steps, which nothing observes, follow `warmup_steps` others (the observed ones among them)."""

    losses: tuple[float, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    parameter_norms: tuple[dict[str, float], ...] = ()
    ranks: tuple[RankMeasured, ...] = ()
    comparison: Comparison | None = None
    warmup_steps: int = 0

    @property
    def steps(self) -> int:
        """Observed steps: one, without a loss, of a traced run."""
        return len(self.losses) or 1

    @property
    def step_s(self) -> tuple[float, ...]:
        """Seconds of the slowest rank in each timed step; empty of a CPU."""
        return tuple(map(max, zip(*(rank.step_s for rank in self.ranks), strict=True)))

    @property
    def differing_actions(self) -> int:
        """Actions of all ranks after which bytes disagree with the ledger."""
        return sum(rank.differing_actions for rank in self.ranks)

    @property
    def fullest(self) -> RankMeasured:
        """The rank with the largest measured peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    def first_errors(self, other: "Measured") -> tuple[float, float]:
        """How far the first loss and the first gradient norm are from another run's, as fractions
        of the other's.  The first step only: AdamW turns the rounding of a small gradient into a
        change of its weight."""
        pairs = ((self.losses, other.losses), (self.gradient_norms, other.gradient_norms))
        loss, norm = (relative(abs(own[0] - its[0]), abs(its[0])) for own, its in pairs)
        return loss, norm
