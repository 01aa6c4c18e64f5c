"""The data of a launch: cases to run, the result of each rank, and the result of a case.

A case's result sums the losses of the ranks and assembles gradients from their shards. An exception
of a rank gives the case its status: out of memory, not a number, or failed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rematbench.engine.program.program import Program
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.worlds.records.measured import TIMED_STEPS
from rematbench.worlds.torch.groups import Coordinates
from rematbench.worlds.torch.parameters import AdamW, ParameterSpec
from rematbench.worlds.torch.streams import Streams

Status = Literal["ok", "oom", "nan", "failed", "timeout", "unsupported"]
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",  # torch's CPU allocator says this
    "CUDA error: out of memory",  # the driver says this of pinned memory or a context
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # NCCL says this of its buffers
)


class NotFinite(ArithmeticError):
    """A loss that is NaN or infinite."""


def failure(error: BaseException) -> tuple[Literal["oom", "nan", "failed"], str]:
    """The status and reason of an error; an error of the executor has its cause's status."""
    cause = error.__cause__ or error
    full = any(words in str(cause) for words in OUT_OF_MEMORY_TEXTS)
    reason = f"{type(error).__name__}: {error}"
    if full or isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
        return "oom", reason
    return "nan" if isinstance(error, NotFinite) else "failed", reason


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan to execute.

    `program` replaces the plan's own lowering if given; `ignored` is the share of labels that the
    loss ignores; `measure` tracks bytes after every action; `shards` records gradient norms,
    `gradients` also keeps the gradients. `streams` makes the streams of a rank, in place of the
    device's (bytes are then not tracked).

    On CUDA `timed_steps` further steps follow, of which only the seconds are recorded, and
    `deterministic` makes torch use kernels with bitwise reproducible results. `activation_bytes`:
    activations of all processes together, from the ledger; the case does not start on a host with
    less free memory. `device_weights`: the device draws the weights, whose bits then depend on the
    kind of device.
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
    streams: Callable[[int], Streams] | None = None
    timed_steps: int = TIMED_STEPS
    deterministic: bool = False
    activation_bytes: int = 0
    device_weights: bool = False
    optimizer: AdamW = field(default_factory=AdamW)

    @property
    def world_size(self) -> int:
        return self.problem.layout.gpus


@dataclass(kw_only=True)
class GradientShard:
    """One rank's part of the summed gradient of one parameter. `part`: the index of the
    tensor-parallel part; `number`: the index of the ZeRO shard inside that part."""

    spec: ParameterSpec
    part: int
    number: int
    shape: tuple[int, ...]
    square_sum: float
    values: Tensor | None


@dataclass(kw_only=True)
class RankResult:
    """The numbers of one process.

    `bytes_after` are the live bytes after each action of the first step; sums and peaks are over
    all steps. `peak_bytes` also counts memory inside operators (without states). `allocated_bytes`,
    `reserved_bytes` and `pinned_bytes` (the host pool) come from CUDA and are 0 on a CPU; `step_s`,
    the seconds of the timed steps, is empty there.
    """

    place: Coordinates
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, GradientShard]] = field(default_factory=list)
    bytes_after: list[tuple[int, int]] = field(default_factory=list)
    device_peak_bytes: int = 0
    host_peak_bytes: int = 0
    peak_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    pinned_bytes: int = 0
    state_bytes: int
    offload_bytes: int = 0
    recompute_flop: float = 0.0
    step_s: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class Result:
    name: str
    status: Status
    reason: str = ""
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    ranks: list[RankResult] = field(default_factory=list)


def combine(case: Case, ranks: list[RankResult]) -> Result:
    """The case's result from the results of all ranks. A gradient or a loss that is not finite
    makes the result `nan`."""
    steps = range(case.steps)
    norms = [_norms(ranks, step) for step in steps] if case.shards else []
    wrong = [
        f"NotFinite: gradient of {name} in step {step} has the norm {norm}"
        for step, of_step in enumerate(norms)
        for name, norm in of_step.items()
        if not math.isfinite(norm)
    ]
    if wrong:
        return Result(name=case.name, status="nan", reason=wrong[0])
    return Result(
        name=case.name,
        status="ok",
        losses=[sum(r.losses[step] for r in ranks if r.place.tp == 0) for step in steps],
        gradient_norms=norms,
        gradients=[_gradients(case, ranks, step) for step in steps] if case.gradients else [],
        ranks=ranks,
    )


def _holders(ranks: list[RankResult], name: str) -> list[list[RankResult]]:
    """The ranks that together hold one copy of a parameter: for each tensor-parallel part, the
    ranks of its ZeRO shards in order."""
    having = [r for r in ranks if name in r.gradients[0]]
    parts: dict[int, dict[int, RankResult]] = {}
    for rank in sorted(having, key=lambda rank: rank.place.pp):
        shard = rank.gradients[0][name]
        parts.setdefault(shard.part, {}).setdefault(shard.number, rank)
    return [[parts[part][n] for n in sorted(parts[part])] for part in sorted(parts)]


def _names(ranks: list[RankResult]) -> list[str]:
    return sorted({name for rank in ranks for name in rank.gradients[0]})


def _norms(ranks: list[RankResult], step: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _names(ranks):
        held = [r for peers in _holders(ranks, name) for r in peers]
        found[name] = sum(r.gradients[step][name].square_sum for r in held) ** 0.5
    return found


def _gradients(case: Case, ranks: list[RankResult], step: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in _names(ranks):
        parts = [
            _whole([r.gradients[step][name] for r in peers]) for peers in _holders(ranks, name)
        ]
        spec = ranks[0].gradients[step].get(name) or next(
            r.gradients[step][name] for r in ranks if name in r.gradients[step]
        )
        if (inner := spec.spec.columns) is not None:  # parts of the same rows are neighbours
            count = case.problem.layout.tp_columns
            rows = [parts[at : at + count] for at in range(0, len(parts), count)]
            parts = [torch.cat(row, inner) for row in rows]
        full = torch.cat(parts, spec.spec.split) if spec.spec.split is not None else parts[0]
        found[name] = full[: spec.spec.shape[0]]  # the padded rows are cut off
    return found


def _whole(shards: list[GradientShard]) -> Tensor:
    values = [shard.values for shard in shards if shard.values is not None]
    flat = torch.cat(values)
    shape = torch.Size(shards[0].shape)
    return flat[: shape.numel()].view(shape)
