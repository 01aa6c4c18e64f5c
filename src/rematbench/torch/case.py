"""What a launch runs and what it answers: cases, rank results, results."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.program.program import Program
from rematbench.runs.measured import TIMED_STEPS
from rematbench.torch.groups import Coordinates
from rematbench.torch.parameters import AdamW, ParameterSpec

Status = Literal["ok", "oom", "nan", "failed", "timeout", "unsupported"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan to execute.

    `program` stands for the plan's own lowering if given; `ignored` is the share of labels that do
    not count; `measure` tracks bytes after every action; `shards` notes gradient norms,
    `gradients` keeps the gradients too.  With `text_bytes` batches are so much of the standard
    library's sources, not random tokens.  With `delay_s` streams are threads and every copy and
    collective waits up to so long (no bytes).  On CUDA `timed_steps` more steps follow, for their
    seconds alone, and `deterministic` asks torch for kernels that give the same bits every time.
    `activation_bytes` is what all processes hold of activations at once, by the ledger: a host
    without room for them is not tried.
    """

    name: str
    problem: Problem
    plan: Plan
    program: Program | None = None
    steps: int = 3
    seed: int = 7
    ignored: float = 0.0
    device: str = "cpu"
    measure: bool = True
    gradients: bool = False
    shards: bool = True
    text_bytes: int = 0
    delay_s: float = 0.0
    delay_seed: int = 0
    timed_steps: int = TIMED_STEPS
    deterministic: bool = False
    activation_bytes: int = 0
    optimizer: AdamW = field(default_factory=AdamW)

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.problem.layout.gpus


@dataclass(kw_only=True)
class GradientShard:
    """What one rank holds of one parameter's summed gradient."""

    spec: ParameterSpec
    shape: tuple[int, ...]
    square_sum: float
    values: Tensor | None


@dataclass(kw_only=True)
class RankResult:
    """One process's numbers.  `bytes_after` are of the first step's actions; sums and peaks are
    over all steps.  `peak_bytes` counts what lives inside an operator too (states apart);
    `allocated_bytes`, `reserved_bytes` and `pinned_bytes` (the host pool) are those of CUDA, 0
    elsewhere, as `step_s` is empty there: seconds of the timed steps."""

    place: Coordinates
    losses: list[float]
    gradients: list[dict[str, GradientShard]]
    bytes_after: list[tuple[int, int]]
    device_peak_bytes: int
    host_peak_bytes: int
    peak_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    pinned_bytes: int = 0
    state_bytes: int
    offload_bytes: int
    recompute_flop: float
    step_s: list[float]


@dataclass(kw_only=True)
class Result:
    """A case's answer: every field is filled when the status is ok."""

    name: str
    status: Status
    reason: str = ""
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    ranks: list[RankResult] = field(default_factory=list)
