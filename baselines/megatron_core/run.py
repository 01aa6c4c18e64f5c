"""Jobs of Megatron-core: under its own schedules on gloo or NCCL, or on fake tensors."""

import contextlib
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from baselines.common.interface import Rank, RankAnswer
from baselines.common.meter import Meter
from baselines.common.training import train
from baselines.common.weights import assemble, model_specs, norms
from baselines.megatron_core import shim
from baselines.megatron_core.guards import check, has_transformer_engine
from baselines.megatron_core.plan import MegatronCore
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.torch.batch import MicroBatch


def stack() -> dict[str, str]:
    engines = [f"transformer-engine{part}" for part in ("", "-torch", "-cu12", "-cu13")]
    found = {name: version(name) for name in ("megatron-core", "torch")}
    for name in engines:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def refuse(job: PackageJob) -> None:
    check(job, _policy(job))
    if job.device == "cpu":
        shim.preload()  # this runs once, before ranks are forked


def _policy(job: PackageJob) -> MegatronCore:
    return msgspec.convert(job.run.parameters["megatron_core"], MegatronCore)


@cache
def _shimmed(real: bool) -> tuple[str, ...]:
    return shim.install(real=real)


def environment(job: PackageJob) -> dict[str, str]:
    """Environment variables of Megatron-LM's launch scripts.

    With one hardware queue kernels start in issue order, so that a collective starts before the
    GEMM that it overlaps with. A rank compiles its few small kernels on one thread, because all
    ranks, and the runs of an agreement, compile at the same time. Offloading also enables
    TransformerEngine's older implementation, which Megatron-LM uses in addition to its own.
    """
    if job.device != "cuda":
        return {}
    moves = {"NVTE_CPU_OFFLOAD_V1": "1"} if _policy(job).offload_modules else {}
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return own | moves


def _label(parts: tuple[str, ...], device: str) -> str:
    if device == "cuda":
        return "megatron-core without TransformerEngine" if parts else "megatron-core"
    return "megatron-core + CPU shim"


def execute(job: PackageJob, rank: Rank) -> RankAnswer:
    device = torch.device("cpu" if job.device == "cpu" else f"cuda:{torch.cuda.current_device()}")
    parts: tuple[str, ...] = ()
    if device.type == "cpu":
        parts = _shimmed(True)
    elif not has_transformer_engine(job):
        parts = shim.install_missing_names()
    from baselines.megatron_core import rank_engine as engine  # noqa: PLC0415  # the shim must come first

    rig = engine.build(job, _policy(job), engine.join_groups(job), device)
    rig.fill()
    kernels = rig.kernels | {name: os.environ[name] for name in environment(job)}
    answer = RankAnswer(label=_label(parts, device.type), shim=parts, kernels=kernels)
    meter = Meter(device=device)
    engine.measured(meter, rig.config)
    # With offloaded activations the first step differs from all others: see fake_schedules.py.
    metered = min(1, job.steps - 1) if _policy(job).offload_modules else 0
    train(Trainer(engine, rig), job, answer, meter, metered)
    answer.host_peak_bytes = engine.pool_bytes()
    answer.state_bytes = Meter(device=device).states(rig.states())
    return answer


class Trainer:
    """Trains a rank's chunks; see `baselines.common.training.Trainer`."""

    def __init__(self, engine: Any, rig: Any) -> None:
        """`engine`: the module `rank_engine`, which can only be imported after the shim."""
        self.engine, self.rig = engine, rig
        self.batches: list[MicroBatch] = []
        self.counted = 0
        self.losses: list[Any] = []

    def load(self, step: int) -> None:
        self.batches, self.counted = self.engine.step_batches(self.rig, step)

    def forward_backward(self, meter: Meter | None) -> None:
        if meter is None:
            self.losses = self.engine.run_step(self.rig, self.batches)
            return
        inputs = [tensor for batch in self.batches for tensor in (batch.ids, batch.labels)]
        meter.states([*self.rig.states(), *inputs, *self.engine.pooled()])
        with meter:
            self.losses = self.engine.run_step(self.rig, self.batches)
        if self.rig.device.type == "cuda":
            torch._dynamo.reset()  # else torch would not compile functions that ran under the meter

    def loss(self) -> float:
        """The mean loss, from the sums of the last stage's ranks with tensor-parallel rank 0."""
        own = sum(float(one["loss"]) for one in self.losses) if self.rig.place.tp == 0 else 0.0
        total = torch.tensor([own], dtype=torch.float64, device=self.rig.device)
        dist.all_reduce(total)
        return float(total) / self.counted

    def gradients(self, *, whole: bool) -> tuple[dict[str, float], dict[str, Tensor]]:
        run = self.rig.job.run
        specs = model_specs(run.model, self.engine.padded_vocab(run))
        pieces = self.rig.gradient_pieces()
        return norms(pieces, specs), assemble(pieces, specs) if whole else {}

    def update(self) -> None:
        self.rig.optimizer.step()


def trace(job: PackageJob) -> RankAnswer:
    parts = _shimmed(False)
    from baselines.megatron_core import fake_schedules  # noqa: PLC0415  # the shim must come first

    answer: RankAnswer = fake_schedules.trace(job, _policy(job))
    run = job.run
    dropped = run.model.dropout > 0 and run.stack.attention == "flash" and run.layout.cp == 1
    answer.label = f"{_label(parts, 'cpu')} (fake tensors)"
    answer.shim = (*parts, "flash") if dropped else parts
    return answer
