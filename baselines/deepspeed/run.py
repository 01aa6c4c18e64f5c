"""Jobs of DeepSpeed: its engine on gloo (CPU accelerator) or NCCL."""

import importlib
import os
from functools import cache
from importlib.metadata import version

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from baselines.common.interface import NotRunnable, Rank, RankAnswer
from baselines.common.meter import Meter
from baselines.common.training import train
from baselines.deepspeed.plan import DeepSpeed
from rematbench.worlds.packages.limits import active_reasons, setup_of
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.torch.batch import Batch

if not torch.cuda.is_available() or not os.environ.get("CUDA_VISIBLE_DEVICES", "all"):
    os.environ["DS_ACCELERATOR"] = "cpu"  # the imports below read it
else:
    os.environ["DS_ACCELERATOR"] = "cuda"

from baselines.deepspeed import engine as ds
from baselines.deepspeed import fake_engine

if os.environ["DS_ACCELERATOR"] == "cpu":  # on a GPU this import would test every operator builder
    from deepspeed.ops import __compatible_ops__

    # DeepSpeed's shared-memory operator serves inference only, and would be compiled here.
    __compatible_ops__["deepspeed_shm_comm"] = False

KERNELS = {
    "core_attention": "torch scaled_dot_product_attention",
    "bytes": "ZeRO's gradients and buckets, made in the backward, count as activations",
}
KERNELS_OF_ZERO_3 = {
    "bytes": "ZeRO 3's bucket and part of the gradients, made at the start, count as states",
    "measured": "the second step if there is one: ZeRO 3 records the first pass, "
    "then fetches ahead",
}


def stack() -> dict[str, str]:
    return {name: version(name) for name in ("deepspeed", "torch")}


def refuse(job: PackageJob) -> None:
    for reason in active_reasons(_policy(job).limits(setup_of(job.run))):
        raise NotRunnable(f"deepspeed: {reason}")
    if job.device == "cpu":
        _preload()


@cache
def _preload() -> None:
    """Import the modules that deepspeed.initialize needs, once and before ranks are forked. One of
    them is torch's compiler, whose import takes four CPU seconds."""
    for name in ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer"):
        importlib.import_module(name)


def environment(job: PackageJob) -> dict[str, str]:
    """No variables, because DeepSpeed's launcher sets none."""
    return {}


def _policy(job: PackageJob) -> DeepSpeed:
    return msgspec.convert(job.run.parameters["deepspeed"], DeepSpeed)


def _label(job: PackageJob, shim: tuple[str, ...]) -> str:
    if job.device != "cpu":
        return "deepspeed"
    return "deepspeed + CPU shim" if shim else "deepspeed on its CPU accelerator"


def _kernels(job: PackageJob) -> dict[str, str]:
    found = KERNELS | KERNELS_OF_ZERO_3 if ds.fetches_ahead(job.run) else dict(KERNELS)
    if job.device == "cuda":
        found["optimizer"] = "torch AdamW, fused"
    elif ds.fetches_ahead(job.run):
        found["bytes"] += "; of gloo's reduce-scatter its own copy of the input is left out"
    return found


def execute(job: PackageJob, rank: Rank) -> RankAnswer:
    with ds.memories(job, _policy(job), real=True) as memories:
        rig = ds.build(job, _policy(job))
        shim = memories.shim
        answer = RankAnswer(label=_label(job, shim), kernels=_kernels(job), shim=shim)
        metered = min(1, job.steps - 1) if ds.fetches_ahead(job.run) else 0
        train(Trainer(rig), job, answer, memories.meter(), metered)
        answer.state_bytes, answer.host_state_bytes = memories.meter().homes(ds.states(rig))
        rig.engine.destroy()
    return answer


class Trainer:
    """Trains with a rank's engine; see `baselines.common.training.Trainer`."""

    def __init__(self, rig: ds.Rig) -> None:
        """`rig`: an engine whose model has its weights."""
        self.rig = rig
        self.batch: Batch | None = None
        self.counted = 0
        self.own: Tensor | float = 0.0

    def load(self, step: int) -> None:
        self.batch = ds.batch_of(self.rig.job, step)
        self.counted = self.batch.counted
        if self.rig.device.type == "cuda":  # a step does not wait for copies
            self.batch = Batch(*(tensor.to(self.rig.device) for tensor in self.batch))

    def forward_backward(self, meter: Meter | None) -> None:
        assert self.batch is not None
        if meter is None:
            self.own = ds.run_step(self.rig, self.batch, self.counted)
            return
        with ds.counted(self.rig, meter):
            self.own = ds.run_step(self.rig, self.batch, self.counted)

    def loss(self) -> float:
        """The mean loss: the sum over all ranks per label that is not ignored."""
        total = torch.tensor([float(self.own)], dtype=torch.float64, device=self.rig.device)
        dist.all_reduce(total)
        return float(total) / self.counted

    def gradients(self, *, whole: bool) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Norms and whole gradients, by DeepSpeed's own function for each parameter."""
        return ds.gradients(self.rig, whole=whole)

    def update(self) -> None:
        self.rig.engine.step()


def trace(job: PackageJob) -> RankAnswer:
    with ds.memories(job, _policy(job), real=False) as memories:
        answer = fake_engine.trace(job, _policy(job), memories)
    answer.shim = (*memories.shim, *answer.shim)
    answer.label = f"{_label(job, answer.shim)} (fake tensors)"
    answer.kernels = {**_kernels(job), **answer.kernels}
    return answer
