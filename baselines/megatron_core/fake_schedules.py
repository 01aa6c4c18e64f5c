"""One rank of any layout on fake tensors: Megatron-core's own schedules without hardware.

Torch's fake process group completes every collective at once; fake tensors have sizes and no
values. Bytes are sizes of storages, without the allocator's rounding, workspaces, and memory that a
kernel allocates for itself. With fine-grained offloading the second step is measured. In the first
step Megatron-core learns the groups of tensors and offloads all of them; in later steps it keeps
the groups that are needed first.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from baselines.common.interface import RankAnswer
from baselines.common.meter import Meter
from baselines.megatron_core import rank_engine as engine
from baselines.megatron_core.config import uses_distributed_optimizer
from baselines.megatron_core.experts import install_balance, is_of_experts
from baselines.megatron_core.plan import MegatronCore
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.record import RunSpec
from rematbench.worlds.torch.batch import MicroBatch

MASTER_AND_MOMENTS = {"bf16": 12, "fp32": 8}
"""Bytes per parameter of two moments and, for bf16 parameters, an fp32 master copy."""


def _push(handler: offload.ChunkOffloadHandler, tensor: torch.Tensor) -> tuple[int, int]:
    """ChunkOffloadHandler.tensor_push without its refusal of fake tensors."""
    group = handler._offloaded_group_index
    tag = (group, handler._tensor_count_current_group)
    handler._tensor_count_current_group += 1
    handler.offload_groups[group - 1].push_tensor(tag, tensor)
    return tag


def trace(job: PackageJob, policy: MegatronCore) -> RankAnswer:
    """The bytes of one rank: the peaks of one step, and its states."""
    run = job.run
    offload.ChunkOffloadHandler.tensor_push = _push
    offload.print_offload_summary_table = lambda *_: None  # printing it is a collective
    # Selective recomputation of norms copies the rebuilt storage into the earlier one. There are no
    # values to copy, and torch's own copy would keep both fake storages alive forever.
    torch.UntypedStorage.copy_ = lambda storage, *_: storage  # type: ignore[method-assign]
    store = FakeStore()
    dist.init_process_group("fake", rank=job.rank, world_size=run.layout.gpus, store=store)
    place = engine.join_groups(job)
    meter = Meter()
    experts = run.model.experts
    balanced = nullcontext() if experts is None else install_balance(experts)
    with FakeTensorMode(allow_non_fake_inputs=True), balanced:
        rig = engine.build(job, policy, place, torch.device("cpu"))
        batches = _batches(run)
        inputs = [tensor for batch in batches for tensor in (batch.ids, batch.labels)]
        states = meter.states([*rig.states(), *inputs])
        engine.measured(meter, rig.config)
        if policy.offload_modules:
            engine.run_step(rig, batches)
            meter.exclude(engine.pooled())
        with meter:
            engine.run_step(rig, batches)
    answer = RankAnswer(
        kernels={**rig.kernels, "optimizer": "its bytes are computed, not allocated"},
        activation_peak_bytes=meter.device_peak_bytes,
        host_peak_bytes=engine.pool_bytes(),
        state_bytes=states + _optimizer_bytes(rig, run),
    )
    engine.leave_groups()
    dist.destroy_process_group()
    return answer


def _batches(run: RunSpec) -> list[MicroBatch]:
    rows = run.layout.micro_batch * run.seq_len // run.layout.cp
    ids = torch.zeros(rows, dtype=torch.int64)
    return [MicroBatch(ids, ids, 1.0) for _ in range(run.layout.num_micro_batches)]


def _optimizer_bytes(rig: engine.Rig, run: RunSpec) -> int:
    counts = {True: 0, False: 0}
    for chunk in rig.chunks:
        for parameter in chunk.parameters():
            counts[is_of_experts(parameter)] += parameter.numel()
    sharded = uses_distributed_optimizer(run)
    shards = {True: run.layout.expert_dp, False: run.layout.state_shards}
    return sum(
        count * MASTER_AND_MOMENTS[run.precision] // (shards[kind] if sharded else 1)
        for kind, count in counts.items()
    )
