"""What was measured of a traced or executed run: bytes beside the ledger's, losses, gradients.

Part of a Record.  CPU seconds are no part of it: they are never performance.
"""

import math
from collections.abc import Sequence

from msgspec import Struct

TIMED_STEPS = 3
"""Steps that a run on GPUs times unless told otherwise."""
LEARNING_RATE = 1e-3
"""Of AdamW in the long training runs whose loss curves are kept."""
BOUNDS = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2}
"""Norm-wise errors that rounding alone may cause (DESIGN.md, the gradient law)."""


class RankMeasured(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process.  Bytes of activations at action boundaries stand beside the issue-order
    ledger's (`differing_actions` of `actions` disagree; the twin law wants none).  `peak_bytes`
    also counts states and what lives inside an operator, beside the simulated total of the same
    saved tensors with the torch runtime's states and kernels, whatever the problem's stack.
    `allocated_bytes`, `reserved_bytes` (the allocator's) and `pinned_bytes` (what torch holds
    pinned for the pool, which may be more than is asked for) are those of CUDA, 0 elsewhere."""

    tp: int
    cp: int
    dp: int
    pp: int
    actions: int
    differing_actions: int
    boundary_peak_bytes: int
    ledger_boundary_peak_bytes: int
    peak_bytes: int
    simulated_peak_bytes: int
    state_bytes: int
    simulated_state_bytes: int
    host_peak_bytes: int
    ledger_host_peak_bytes: int
    offload_bytes: int
    recompute_flop: float
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    pinned_bytes: int = 0

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


def first_errors(
    own: tuple[Sequence[float], Sequence[float]], other: tuple[Sequence[float], Sequence[float]]
) -> tuple[float, float]:
    """How far the first losses and the first gradient norms of two runs are apart, as fractions of
    the other's; each run is (losses, gradient norms).  The first step only: AdamW turns the
    rounding of a small gradient into a change of its weight."""
    loss, norm = (
        relative(abs(values[0] - others[0]), abs(others[0]))
        for values, others in zip(own, other, strict=True)
    )
    return loss, norm


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


class Measured(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run's numbers: per step the loss and the norm of the whole gradient, per rank its bytes.
    `step_s` is filled on GPUs only: steps after those, which nothing observes."""

    steps: int
    losses: tuple[float, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    ranks: tuple[RankMeasured, ...] = ()
    comparison: Comparison | None = None
    step_s: tuple[float, ...] = ()

    @property
    def differing_actions(self) -> int:
        """Actions of all ranks after which bytes disagree with the ledger."""
        return sum(rank.differing_actions for rank in self.ranks)

    @property
    def fullest(self) -> RankMeasured:
        """The rank with the largest measured peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)
