"""Jobs of Megatron-core: under its schedules on gloo or NCCL, or on fake tensors."""

from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from baselines.common.contract import NotRunnable, Rank, RankAnswer
from baselines.common.meter import Meter
from baselines.common.weights import assemble, model_specs
from baselines.megatron_core import shim
from baselines.megatron_core.arguments import policy_of
from baselines.megatron_core.guards import check
from baselines.megatron_core.plan import MegatronCore
from rematbench.baselines.process import Job


def stack() -> dict[str, str]:
    """Packages and their versions."""
    return {name: version(name) for name in ("megatron-core", "torch")}


def refuse(job: Job) -> None:
    """The guards, before any process starts."""
    check(job, _policy(job))
    if job.device == "cpu":
        shim.preload()  # once, before ranks are forked
    if job.device == "cuda" and not torch.cuda.is_available():
        raise NotRunnable("megatron_core: no CUDA device here")


def _policy(job: Job) -> MegatronCore:
    policy = msgspec.convert(job.run.parameters["megatron_core"], MegatronCore)
    return policy_of(job.options, policy) if job.options else policy


@cache
def _shimmed(real: bool) -> tuple[str, ...]:
    return shim.install(real=real)


def _label(parts: tuple[str, ...]) -> str:
    return "megatron-core + CPU shim" if parts else "megatron-core"


def execute(job: Job, rank: Rank) -> RankAnswer:
    """Train on this rank."""
    parts = _shimmed(True) if job.device == "cpu" else ()
    from baselines.megatron_core import step as engine  # noqa: PLC0415  # after the shim

    device = torch.device("cpu" if job.device == "cpu" else f"cuda:{torch.cuda.current_device()}")
    rig = engine.build(job, _policy(job), engine.join_groups(job), device)
    rig.fill()
    answer = RankAnswer(label=_label(parts), shim=parts, kernels=rig.kernels)
    meter = Meter()
    engine.measured(meter, rig.config)
    for step in range(job.warmup + job.steps):
        _step(engine, rig, answer, step, meter if step == 0 else None)
    answer.activation_peak_bytes = meter.device_peak_bytes
    answer.host_peak_bytes = meter.host_peak_bytes
    answer.state_bytes = Meter().states(rig.states())
    return answer


def _step(engine: Any, rig: Any, answer: RankAnswer, step: int, meter: Meter | None) -> None:
    batches, counted = engine.step_batches(rig, step)
    start = engine.seconds()
    if meter is None:
        losses = engine.run_step(rig, batches)
    else:
        inputs = [tensor for batch in batches for tensor in (batch.ids, batch.labels)]
        meter.states([*rig.states(), *inputs])
        with meter:
            losses = engine.run_step(rig, batches)
    total = torch.tensor(
        [sum(float(one["loss"]) for one in losses) if rig.place.tp == 0 else 0.0],
        dtype=torch.float64, device=rig.device,
    )  # fmt: skip
    dist.all_reduce(total)
    answer.losses.append(float(total) / counted)
    specs = model_specs(rig.job.run.model, rig.padded_vocab)
    norms, whole = assemble(rig.gradient_pieces(), specs)
    answer.gradient_norms.append(norms)
    if step == 0 and rig.job.gradients and dist.get_rank() == 0:
        answer.gradients = whole
    before = engine.seconds()
    rig.optimizer.step()
    answer.step_s.append(engine.seconds() - start if meter is None else before - start)


def trace(job: Job) -> RankAnswer:
    """One rank's bytes on fake tensors, through the same schedules."""
    parts = _shimmed(False)
    from baselines.megatron_core import fake  # noqa: PLC0415  # after the shim

    answer: RankAnswer = fake.trace(job, _policy(job))
    answer.label, answer.shim = f"{_label(parts)} (fake tensors)", parts
    return answer
