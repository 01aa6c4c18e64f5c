"""One rank of any layout on fake tensors: DeepSpeed's own engine, and no hardware.

Torch's fake process group answers every collective at once; fake tensors have sizes and no values.
Forward and backward of every micro-batch run as they are; the update, which asks whether a gradient
is finite, does not.  Bytes are those of storages: no allocator rounding, no workspaces.
"""

import os
from collections.abc import Callable
from typing import Any, Self

import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
from deepspeed.runtime.zero import partitioned_param_coordinator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from baselines.common.contract import RankAnswer
from baselines.common.meter import Meter
from baselines.deepspeed import engine as ds
from baselines.deepspeed.model import Decoder
from baselines.deepspeed.plan import DeepSpeed
from rematbench.baselines.process import Job

_tiled_backward = TiledFusedLogitsLoss.backward
COUNTER = 4
"""Bytes of AdamW's step counter beside its two moments."""


class Made(Decoder):
    """A decoder whose parameters are made as they are wanted: torch converts no fake ones."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        return self


def trace(job: Job, policy: DeepSpeed) -> RankAnswer:
    """The bytes of one rank: the peak of one step, and its states."""
    size = job.run.layout.gpus
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(size), LOCAL_RANK="0")
    dist.init_process_group("fake", rank=job.rank, world_size=size, store=FakeStore())
    wanted = torch.bfloat16 if job.run.precision == "bf16" else torch.float32
    # ZeRO 3 asks whether every rank has recorded the same modules, by value.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: None
    TiledFusedLogitsLoss.backward = _unscaled
    meter = Meter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(wanted)
        rig = ds.build(job, policy, Made)
        torch.set_default_dtype(torch.float32)
        batch = ds.batch_of(job, 0)
        if ds.fetches_ahead(job.run):
            ds.micro_steps(rig, batch, 1.0, lambda _: 0.0)
            _updated(rig.engine.optimizer)
        with ds.counted(rig, meter):
            ds.micro_steps(rig, batch, 1.0, lambda _: 0.0)
    moments = sum(8 * p.numel() + COUNTER for p in ds.updated(rig, without_state=True))
    answer = RankAnswer(
        kernels={"optimizer": "moments that it has not made yet are computed, not allocated"},
        activation_peak_bytes=meter.device_peak_bytes,
        state_bytes=Meter().states(ds.states(rig)) + moments,
    )
    rig.engine.destroy()
    deepspeed.comm.destroy_process_group()
    return answer


def _unscaled(ctx: Any, *gradients: Any) -> Any:
    """TiledFusedLogitsLoss.backward, whose gradient is 1 (it is given the whole loss) as a number
    that it can compare with 1."""
    return _tiled_backward(ctx, 1.0, *gradients[1:])


def _updated(optimizer: Any) -> None:
    """What ZeRO 3's update does to parameters and gradients, without the update."""
    optimizer._partition_all_parameters()
    optimizer.zero_grad()
    optimizer._post_step(())
