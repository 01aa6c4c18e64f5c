"""What a baseline's run.py provides, and what one rank of a job answers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rematbench.packages.process import Job


@dataclass(kw_only=True)
class RankAnswer:
    """One rank's numbers; rank 0 of an executed job has the whole job's losses and gradients.  The
    allocator's peaks are those of CUDA, as seconds are."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    activation_peak_bytes: int = 0
    host_peak_bytes: int = 0
    state_bytes: int = 0
    host_state_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    pinned_bytes: int = 0
    step_s: list[float] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)
    shim: tuple[str, ...] = ()
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Where a process stands: rank, world size, rank on its node, and the job's own folder."""

    rank: int
    size: int
    local: int
    folder: Path


class NotRunnable(ValueError):
    """The package, or this baseline, does not run that; the message names it."""


class Runner(Protocol):
    """The module `baselines.<name>.run`."""

    def stack(self) -> dict[str, str]:
        """Packages and their versions."""
        ...

    def refuse(self, job: Job) -> None:
        """Raise NotRunnable for what must not even be tried."""
        ...

    def environment(self, job: Job) -> dict[str, str]:
        """Variables that the package's users set before CUDA starts."""
        ...

    def execute(self, job: Job, rank: Rank) -> RankAnswer:
        """Train on this rank; torch.distributed is there already."""
        ...

    def trace(self, job: Job) -> RankAnswer:
        """One rank's bytes on fake tensors."""
        ...
