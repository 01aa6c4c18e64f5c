"""One rank of any layout on fake tensors: DeepSpeed's own engine without hardware.

Torch's fake process group completes every collective at once; fake tensors have sizes and no
values. Forward and backward of every micro-batch run unchanged. The update does not run, because it
tests whether gradients are finite. Bytes are sizes of storages, without the allocator's rounding
and workspaces.

Where DeepSpeed reads a value before the update, a part of the shim gives the answer; a record lists
the parts:

| part | the answer |
|---|---|
| order | ZeRO 3: all ranks have recorded the same modules |
| unscaled | TiledFusedLogitsLoss: the gradient of the loss is 1 |
| finite | ZeRO 1 and 2, optimizer offloaded: no gradient is inf (the same operators run) |
| sizes | partitioned checkpointing: the tensor that holds a shape gives this shape |
| moments | ZeRO 0, bf16: the first step of AdamW, which makes its moments, is not run |
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
from deepspeed.runtime.zero import partitioned_param_coordinator, stage_1_and_2
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from baselines.common.interface import RankAnswer
from baselines.deepspeed import engine as ds
from baselines.deepspeed.model import Decoder
from baselines.deepspeed.plan import DeepSpeed
from baselines.deepspeed.zero_sizes import ZERO_3
from rematbench.worlds.packages.process import PackageJob

_tiled_backward = TiledFusedLogitsLoss.backward
_has_inf_or_nan = stage_1_and_2.has_inf_or_nan
_for_backward = checkpointing.get_partitioned_activations_for_backward
COUNTER = 4
"""Bytes of AdamW's step counter, which it keeps in addition to its two moments."""


class DirectDecoder(Decoder):
    """A decoder whose parameters are created directly on the right device and in the right dtype,
    because torch cannot convert fake parameters."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with torch.device(get_accelerator().current_device_name()):
            super().__init__(*arguments, **options)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        return self


def trace(job: PackageJob, policy: DeepSpeed, memories: ds.Memories) -> RankAnswer:
    size = job.run.layout.gpus
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(size), LOCAL_RANK="0")
    dist.init_process_group("fake", rank=job.rank, world_size=size, store=FakeStore())
    wanted = torch.bfloat16 if job.run.precision == "bf16" else torch.float32
    # ZeRO 3 compares values to see whether all ranks have recorded the same modules.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: None
    # TiledFusedLogitsLoss.backward compares the loss's gradient with 1, and a fake tensor has no
    # value. The gradient is 1, because the function computes the whole loss.
    TiledFusedLogitsLoss.backward = lambda ctx, _, *rest: _tiled_backward(ctx, 1.0, *rest)
    stage_1_and_2.has_inf_or_nan = _finite
    checkpointing.get_partitioned_activations_for_backward = _partitioned
    FP16_UnfusedOptimizer.initialize_optimizer_states = lambda _: None
    meter = memories.meter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(wanted)
        rig = ds.build(job, policy, DirectDecoder)
        torch.set_default_dtype(torch.float32)
        batch = ds.batch_of(job, 0)
        if ds.fetches_ahead(job.run):
            ds.micro_steps(rig, batch, 1.0, lambda _: None)
            # Do to parameters and gradients what ZeRO 3's update does, without the update itself.
            rig.engine.optimizer._partition_all_parameters()
            rig.engine.optimizer.zero_grad()
            rig.engine.optimizer._post_step(())
        with ds.counted(rig, meter):
            ds.micro_steps(rig, batch, 1.0, lambda _: None)
    here, host = memories.meter().homes(ds.states(rig))
    for part in ds.updated(rig, without_state=True):
        offloaded = memories.on_host is not None and memories.on_host(part)
        counted_there = COUNTER if memories.on_host is not None else 0  # the counter is on the host
        here += (0 if offloaded else 8 * part.numel()) + COUNTER - counted_there
        host += (8 * part.numel() if offloaded else 0) + counted_there
    answer = RankAnswer(
        shim=_parts(job, policy),
        kernels={"optimizer": "moments that it has not made yet are computed, not allocated"},
        activation_peak_bytes=meter.device_peak_bytes,
        host_peak_bytes=meter.host_peak_bytes,
        state_bytes=here,
        host_state_bytes=host,
    )
    rig.engine.destroy()
    deepspeed.comm.destroy_process_group()
    return answer


def _parts(job: PackageJob, policy: DeepSpeed) -> tuple[str, ...]:
    made = ds.configuration(job, policy)
    zero, checkpointed = made["zero_optimization"], made.get("activation_checkpointing", {})
    parts = {
        "order": zero["stage"] == ZERO_3,
        "unscaled": policy.loss_tiles > 1,
        "finite": zero["stage"] < ZERO_3 and "offload_optimizer" in zero,
        "sizes": checkpointed.get("partition_activations", False),
        "moments": zero["stage"] == 0 and job.run.precision == "bf16",
    }
    return tuple(part for part, needed in parts.items() if needed)


def _finite(gradient: Tensor) -> bool:
    """has_inf_or_nan for a gradient without values: run the same operators, then return False."""
    _has_inf_or_nan(gradient)
    return False


def _partitioned(args: tuple[Any, ...], *rest: Any) -> list[Any]:
    """get_partitioned_activations_for_backward with readable shapes in its size tensors."""
    shapes = [list(arg.size()) if isinstance(arg, Tensor) else None for arg in args]
    made: list[Any] = _for_backward(args, *rest)
    for size, shape in zip(made[1::2], shapes, strict=True):
        if size is not None:
            size.numpy = partial(list, shape)
    return made
