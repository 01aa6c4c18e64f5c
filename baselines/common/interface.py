"""The functions that a baseline's run.py provides, and the answer of one rank of a job."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rematbench.worlds.packages.process import PackageJob


@dataclass(kw_only=True)
class RankAnswer:
    """The numbers of one rank. Rank 0 of an executed job has the losses and gradients of the whole
    job. The allocator's peaks and the seconds come from CUDA only."""

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
    """A process of a job: its rank, the number of ranks, its rank on its node, and a folder."""

    rank: int
    size: int
    local: int
    folder: Path


class NotRunnable(ValueError):
    """The package or this baseline does not run a job; the message names the feature."""


class Runner(Protocol):
    """The interface of a module `baselines.<name>.run`."""

    def stack(self) -> dict[str, str]:
        """The packages of the baseline and their versions."""
        ...

    def refuse(self, job: PackageJob) -> None:
        """Raise NotRunnable for a job that must not be started."""
        ...

    def environment(self, job: PackageJob) -> dict[str, str]:
        """Environment variables that the package's users set before CUDA starts."""
        ...

    def execute(self, job: PackageJob, rank: Rank) -> RankAnswer:
        """Train on this rank; torch.distributed is initialised already."""
        ...

    def trace(self, job: PackageJob) -> RankAnswer:
        """The bytes of one rank on fake tensors."""
        ...
