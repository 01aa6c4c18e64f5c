"""The data of a launch: cases to run, results of ranks, results of cases."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from rematbench.engine.program.program import Program
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.worlds.records.measured import TIMED_STEPS
from rematbench.worlds.torch.groups import Coordinates
from rematbench.worlds.torch.parameters import AdamW, ParameterSpec

Status = Literal["ok", "oom", "nan", "failed", "timeout", "unsupported"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan to execute.

    `program` replaces the plan's own lowering if given; `ignored` is the share of labels that do
    not count; `measure` tracks bytes after every action; `shards` records gradient norms,
    `gradients` also keeps the gradients. With `text_bytes` the batches are that many bytes of the
    standard library's sources in place of random tokens. With `delay_s` streams are threads, and
    every copy and collective waits up to `delay_s` seconds (bytes are then not tracked).

    On CUDA `timed_steps` further steps follow, for their seconds alone, and `deterministic` asks
    torch for kernels that give the same bits every time. `activation_bytes` are the activations of
    all processes at once, by the ledger: a case is not started on a host without memory for them.
    `drawn_here`: the device draws the weights, whose bits are then those of its kind.
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
    drawn_here: bool = False
    optimizer: AdamW = field(default_factory=AdamW)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.problem.layout.gpus


@dataclass(kw_only=True)
class GradientShard:
    """One rank's part of the summed gradient of one parameter."""

    spec: ParameterSpec
    shape: tuple[int, ...]
    square_sum: float
    values: Tensor | None


@dataclass(kw_only=True)
class RankResult:
    """The numbers of one process.

    `bytes_after` are of the first step's actions; sums and peaks are over all steps. `peak_bytes`
    also counts memory inside operators (without states). `allocated_bytes`, `reserved_bytes` and
    `pinned_bytes` (the host pool) come from CUDA and are 0 on a CPU; `step_s`, the seconds of the
    timed steps, is empty there.
    """

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
    """The result of a case: every field is filled when the status is ok."""

    name: str
    status: Status
    reason: str = ""
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    ranks: list[RankResult] = field(default_factory=list)
