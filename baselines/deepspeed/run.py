"""Jobs of DeepSpeed: its engine on gloo (CPU accelerator) or NCCL."""

import os
from importlib.metadata import version

import msgspec
import torch
import torch.distributed as dist

from baselines.common.contract import NotRunnable, Rank, RankAnswer
from baselines.common.meter import Meter
from baselines.deepspeed.guards import check
from baselines.deepspeed.plan import DeepSpeed
from rematbench.baselines.process import Job

if not torch.cuda.is_available() or not os.environ.get("CUDA_VISIBLE_DEVICES", "all"):
    os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.ops import __compatible_ops__  # reads the variable above

from baselines.deepspeed import engine as ds
from baselines.deepspeed import fake

# Its shared-memory operator serves inference only, and would be compiled here.
__compatible_ops__["deepspeed_shm_comm"] = False

KERNELS = {
    "core_attention": "torch scaled_dot_product_attention",
    "bytes": "ZeRO's gradients and buckets, made in the backward, count as activations",
}
KERNELS_OF_ZERO_3 = {
    "bytes": "ZeRO 3's bucket and part of the gradients, made at the start, count as states; "
    "of gloo's reduce-scatter its own copy of the input is left out",
    "measured": "the second step if there is one: ZeRO 3 records the first pass, "
    "then fetches ahead",
}


def stack() -> dict[str, str]:
    """Packages and their versions."""
    return {name: version(name) for name in ("deepspeed", "torch")}


def refuse(job: Job) -> None:
    """The guards, before any process starts."""
    check(job, _policy(job))
    ds.configuration(job, _policy(job))
    if job.device == "cuda" and not torch.cuda.is_available():
        raise NotRunnable("deepspeed: no CUDA device here")


def _policy(job: Job) -> DeepSpeed:
    return msgspec.convert(job.run.parameters["deepspeed"], DeepSpeed)


def _label(job: Job, shim: tuple[str, ...]) -> str:
    if job.device != "cpu":
        return "deepspeed"
    return "deepspeed + CPU shim" if shim else "deepspeed on its CPU accelerator"


def _kernels(job: Job) -> dict[str, str]:
    return {**KERNELS, **KERNELS_OF_ZERO_3} if ds.fetches_ahead(job.run) else KERNELS


def execute(job: Job, rank: Rank) -> RankAnswer:
    """Train on this rank."""
    with ds.memories(job, _policy(job), real=True) as memories:
        rig = ds.build(job, _policy(job))
        shim = memories.shim
        answer = RankAnswer(label=_label(job, shim), kernels=_kernels(job), shim=shim)
        meter = memories.meter()
        steps = job.warmup + job.steps
        measured = min(1, steps - 1) if ds.fetches_ahead(job.run) else 0
        for step in range(steps):
            _step(rig, answer, step, meter if step == measured else None)
        answer.activation_peak_bytes = meter.device_peak_bytes
        answer.host_peak_bytes = meter.host_peak_bytes
        answer.state_bytes, answer.host_state_bytes = memories.meter().homes(ds.states(rig))
        rig.engine.destroy()
    return answer


def _step(rig: ds.Rig, answer: RankAnswer, step: int, meter: Meter | None) -> None:
    batch = ds.batch_of(rig.job, step)
    start = ds.now()
    if meter is None:
        own = ds.run_step(rig, batch)
    else:
        with ds.counted(rig, meter):
            own = ds.run_step(rig, batch)
    total = torch.tensor([own], dtype=torch.float64, device=rig.device)
    dist.all_reduce(total)
    answer.losses.append(float(total) / batch.counted)
    spent = ds.now() - start
    whole = ds.gradients(rig)
    answer.gradient_norms.append({name: float(grad.norm()) for name, grad in whole.items()})
    if step == 0 and rig.job.gradients and dist.get_rank() == 0:
        answer.gradients = whole
    start = ds.now()
    rig.engine.step()
    answer.step_s.append(spent + ds.now() - start)


def trace(job: Job) -> RankAnswer:
    """One rank's bytes on fake tensors, through the same engine."""
    with ds.memories(job, _policy(job), real=False) as memories:
        answer = fake.trace(job, _policy(job), memories)
    answer.shim = (*memories.shim, *answer.shim)
    answer.label = f"{_label(job, answer.shim)} (fake tensors)"
    answer.kernels = {**_kernels(job), **answer.kernels}
    return answer
