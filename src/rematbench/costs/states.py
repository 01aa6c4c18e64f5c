"""Bytes of a rank's parameters, gradients and optimizer states, HBM traffic of the optimizer step,
and device memory outside the framework's allocator (driver, context, communicators).

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): stage 1 shards the optimizer over data-parallel
(and context-parallel) ranks, stage 2 also the gradients, stage 3 also the parameters. FSDP full
shard is stage 3.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from rematbench.costs.collectives import EXPERT_AXES, degrees, group_stride, worst_group
from rematbench.costs.copies import pinned_block_bytes
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.constants import Calibration, CommonConstants
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import System
from rematbench.workload import PACKED_BYTES, Workload

OPTIMIZER_STAGE, GRADIENT_STAGE, PARAMETER_STAGE = 1, 2, 3


class StateBytes(Struct, frozen=True, kw_only=True):
    """Resident bytes of one rank's training states."""

    parameter: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameter + self.gradient + self.optimizer


def shard(parameters: int, shards: int) -> int:
    """The number of parameters on the fullest rank, if `shards` ranks share `parameters`."""
    return -(-parameters // shards)


def state_bytes(
    parameters: int, layout: Layout, system: System, shards: int | None = None
) -> StateBytes:
    """Resident bytes of a rank's states for `parameters` (its own after tensor, pipeline and expert
    parallelism), which ZeRO shards over `shards` ranks (None: the data- and context-parallel
    peers).

    The temporary copies that ranks gather (ZeRO-3 layers, FSDP units) are not counted here.
    """
    among = layout.state_shards if shards is None else shards
    held, reduced, updated = (
        shard(parameters, among if layout.zero_stage >= stage else 1)
        for stage in (PARAMETER_STAGE, GRADIENT_STAGE, OPTIMIZER_STAGE)
    )
    return StateBytes(
        parameter=held * system.states.param_bytes,
        gradient=reduced * system.states.grad_bytes,
        optimizer=updated * system.states.optimizer_bytes,
    )


def fsdp_shards(layout: Layout, system: System) -> bool:
    sharded = layout.zero_stage == PARAMETER_STAGE and layout.state_shards > 1
    return sharded and system.zero.data_parallel == "fsdp"


def unsharded_scales(work: Workload, layout: Layout, system: System) -> int:
    """Bytes of the scales of packed weights that a rank holds beyond its shard.  FSDP does not
    shard scales, because they are not parameters (bitsandbytes, nn/modules.py,
    Params4bit.quant_state; AutoGPTQ's buffers)."""
    scales = PACKED_BYTES.get(work.base_dtype, Fraction()) % Fraction(1, 2)
    beside = scales * (1 - Fraction(1, layout.state_shards)) * fsdp_shards(layout, system)
    return int(beside * work.model.active_layer_matrices)


# -- states in host memory -----------------------------------------------------------------------


class HostStates(Struct, frozen=True, kw_only=True):
    """Host bytes of one rank's states: those held all the time, with pinned blocks rounded up, and
    those of a temporary copy during the update."""

    held: int
    update: int = 0


def sub_groups(parts: Iterable[int], minimum: int) -> list[int]:
    """The numbers of parameters of each sub-group on a rank whose tensors have `parts` parameters.
    A group takes successive tensors until it has at least `minimum` (0: one group of all tensors).
    Source: DeepSpeed 0.19.8, stage3.py, _create_fp16_sub_groups."""
    groups, open_group = [], 0
    for part in parts:
        open_group += part
        if minimum and open_group >= minimum:
            groups.append(open_group)
            open_group = 0
    return [*groups, open_group] if open_group else groups


def zero3_host_states(
    tensors: Sequence[int],
    shards: int,
    system: System,
    *,
    optimizer: bool = True,
    parameters: bool = False,
    share: float = 1.0,
) -> HostStates:
    """Host bytes of a rank's states with ZeRO 3, which shards each tensor (`tensors`: parameters of
    each).  `optimizer`: the host updates the shards.  `parameters`: the shards are in host memory,
    as are the pinned blocks that held them before, because torch keeps blocks.  `share`: the share
    of sub-groups that the host updates, counted from the last.

    Source: DeepSpeed 0.19.8, stage3.py.  Master weights and moments are pageable
    (_create_fp32_partitions, ops/adam/cpu_adam.py); the gradients that the update reads are a
    pinned buffer for each sub-group (initialize_optimizer_states); the gradients of all sub-groups
    in compute precision are one pinned buffer (_setup_for_real_optimizer), and so are parameters in
    host memory (_create_param_groups_fp16_flat_cpu_memory), which partition_parameters.py pinned
    one by one before (_partition_param).  After its update a sub-group is
    converted to compute precision on the host and copied to the device
    (_reassign_or_swap_out_partitioned_parameters; torch, Copy.cu: a blocking copy converts on the
    CPU).
    """
    parts = [shard(count, shards) for count in tensors]
    groups = sub_groups(parts, system.zero.sub_group_parameters)
    hosted = groups[int((1.0 - share) * len(groups)) :] if optimizer else []
    held = sum(
        system.states.optimizer_bytes * group + _block(system, system.host.host_grad_bytes * group)
        for group in hosted
    )
    held += _block(system, system.states.grad_bytes * sum(parts)) if optimizer else 0
    if parameters:
        held += _pinned(system, system.states.param_bytes * sum(parts))
        moved = (
            [system.states.param_bytes * part for part in parts] if system.host.host_pinned else []
        )
        held += sum(_pinned(system, nbytes) for nbytes in moved)
    update = 0 if parameters else system.states.param_bytes * max(hosted, default=0)
    return HostStates(held=held, update=update)


def pieces_host_bytes(updated: Sequence[int], visiting: Sequence[int], system: System) -> int:
    """Host bytes of a rank's optimizer states in pieces, which the host updates or which visit the
    device (`updated`, `visiting`: parameters of each piece).

    The states of a piece that visits the device are one pinned buffer, so that a visit is one copy.
    A piece that the host updates has pageable states, the pinned gradients that the update reads,
    and pinned weights in compute precision on their way to the device.
    """
    held = sum(_block(system, system.states.optimizer_bytes * count) for count in visiting)
    for count in updated:
        held += system.states.optimizer_bytes * count
        held += _block(system, system.host.host_grad_bytes * count)
        held += _block(system, system.states.param_bytes * count)
    return held


def tensors_host_bytes(parts: Sequence[int], system: System) -> int:
    """Host bytes of a rank that updates `parts` parameters of each of its tensors on the host: a
    copy of the weights, pinned gradients, and pageable moments. The copy is pinned if the device
    has the weights in fp32 (`resident_bytes`). Weights in 16 bits are copied into a pinned block,
    which the next tensor uses again, and from there into pageable fp32. Source: megatron-core
    0.16.1, optimizer/cpu_offloading/hybrid_optimizer.py (_get_sub_optimizer_param_groups,
    _set_sub_optimizer_grads)."""
    width, rest = system.host.host_grad_bytes, system.states.optimizer_bytes
    pinned = 2 if system.host.resident_bytes else 1
    rest -= (pinned - 1) * width
    return sum(pinned * _block(system, width * part) + rest * part for part in parts)


def zero1_host_states(
    tensors: Sequence[int], shards: int, system: System, *, accumulates: bool
) -> HostStates:
    """Host bytes of a rank's states if ZeRO 1 or 2 updates one of `shards` equal parts of all
    `tensors` on the host.  `accumulates`: a step has several micro-batches.

    Source: DeepSpeed 0.19.8, stage_1_and_2.py.  It pins the master weights, their gradients, the
    updated weights in compute precision (param_buffer_of_bit16_for_cpu_offload_groups), a buffer
    for the gradient of the largest tensor (temp_grad_buffer_for_cpu_offload), and with several
    micro-batches the gradient of each tensor of the part (accumulated_grads_in_cpu).
    """
    part, master = shard(sum(tensors), shards), system.host.host_grad_bytes
    pinned = [master * part, master * part, system.states.param_bytes * part]
    pinned += [system.states.grad_bytes * max(tensors, default=0)]
    moments = max(0, system.states.optimizer_bytes - master) * part
    sums = _fullest_sums(tensors, part, system) if accumulates else 0
    return HostStates(held=moments + sum(_block(system, n) for n in pinned) + sums)


def _fullest_sums(tensors: Sequence[int], part: int, system: System) -> int:
    """Host bytes of whole gradients, for the part whose tensors need the most."""
    ends = np.cumsum(np.asarray(tensors, np.int64)) if tensors else np.zeros(0, np.int64)
    sizes = [_block(system, system.states.grad_bytes * count) for count in tensors]
    sums = np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))])
    starts = np.arange(0, ends[-1] if len(ends) else 0, max(1, part))
    first = np.searchsorted(ends, starts, side="right")
    last = np.searchsorted(ends, np.minimum(starts + part, ends[-1:]), side="left")
    return int((sums[last + 1] - sums[first]).max(initial=0))


def _block(system: System, nbytes: int) -> int:
    """Host bytes of a buffer of `nbytes`, which is pinned if the stack pins buffers."""
    return _pinned(system, nbytes) if system.host.host_pinned else nbytes


def _pinned(system: System, nbytes: int) -> int:
    return nbytes if system.host.pinned_blocks == "exact" else pinned_block_bytes(nbytes)


class Buckets(Struct, frozen=True, kw_only=True):
    """Device bytes of the reduce buckets that a stack under ZeRO allocates whole.

    `standing`: buckets that are alive all the time (ZeRO 3: one bucket; ZeRO 1 with several
    micro-batches: from the first backward to the end of the step). `opened`: buckets that are alive
    in a backward that reduces, from its first gradient to its end. `copy`: the largest copy of a
    bucket that a reduction makes. `part`: the rank's part of the gradients, which reductions write
    while the summed gradients are still alive.
    """

    standing: int = 0
    opened: int = 0
    copy: int = 0
    part: int = 0


def reduce_buckets(parameters: int, layout: Layout, system: System) -> Buckets:
    """The buckets of a rank with `parameters` parameters (before any ZeRO sharding).

    Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py: setup_buckets, allreduce_bucket,
    copy_grads_in_partition, overlapping_partition_gradients_reduce_epilogue; stage3.py:
    ipg_buckets.
    """
    size, stage = system.zero.bucket_bytes, layout.zero_stage
    ddp = system.zero.ddp_buckets and system.zero.data_parallel == "zero"
    if ddp and stage == 0 and layout.has_peers:
        return Buckets(standing=system.states.grad_bytes * parameters)
    if not system.zero.whole_buckets or not size or layout.state_shards == 1 or stage == 0:
        return Buckets()
    if stage == PARAMETER_STAGE:
        return Buckets(standing=size, copy=size)
    several = layout.num_micro_batches > 1
    buckets = (2 if system.zero.reduce_overlap else 1) * size
    stays = stage == OPTIMIZER_STAGE and several
    part = system.states.grad_bytes * shard(parameters, layout.state_shards)
    return Buckets(
        standing=buckets if stays else 0,
        opened=0 if stays else buckets,
        copy=size,
        part=part if stage == OPTIMIZER_STAGE or several else 0,
    )


def optimizer_traffic_bytes(system: System, common: CommonConstants) -> float:
    """HBM bytes per parameter of clipping and one fused Adam step.

    Gradients are read for the norm and again for the update; master weights, moments and scratch
    are read and written; compute parameters are written. Stacks move `optimizer_extra_bytes` more
    (gradient zeroing and unscaling). Source: Kingma & Ba 2015 for the states; apex FusedAdam reads
    and writes each once.
    """
    own = system.states
    updated = own.optimizer_bytes + own.step_scratch_bytes
    return 2.0 * own.grad_bytes + 2.0 * updated + own.param_bytes + common.optimizer_extra_bytes


def non_torch_bytes(
    cluster: Cluster, layout: Layout, system: System, calibration: Calibration
) -> int:
    """Device bytes outside torch's allocator: the measured bytes in the cluster file, otherwise
    those of the driver, the CUDA context and NCCL's buffers for each communicator of the layout."""
    if cluster.non_torch_bytes is not None:
        return cluster.non_torch_bytes
    common = calibration.common
    alike = replace(layout, micro_batch=1, global_batch=1, vpp=1, zero_stage=1, stages="")
    inside, between = communicators(alike, cluster.domain(layout.gpus), system.parallel.rank_order)
    buffers = inside * common.communicator_node_bytes + between * common.communicator_network_bytes
    gpu = calibration.gpu_bytes(cluster.generation)
    return int(gpu.withheld_bytes + gpu.context_bytes + buffers)


def room_bytes(cluster: Cluster, calibration: Calibration) -> int:
    """Device bytes that processes may take: the device's memory minus the driver's share.
    nvidia-smi does not count the driver's bytes as used: rows that ran out of memory on an A100 of
    81,920 MiB show at most 81,045 (fms-acceleration @876e2ed)."""
    withheld = int(calibration.gpu_bytes(cluster.generation).withheld_bytes)
    if cluster.non_torch_bytes is not None:
        withheld = min(withheld, cluster.non_torch_bytes)
    return cluster.hbm_bytes - withheld


@lru_cache(maxsize=4096)
def communicators(layout: Layout, domain: int, order: tuple[str, ...]) -> tuple[int, int]:
    """(number of a rank's communicators within an NVLink domain, number of those over several
    domains).

    A rank has the tensor, context, data, data-with-context and pipeline groups and the group of all
    ranks; a pipeline has one more for the embedding's gradient, and expert parallelism has its own
    groups. Groups with equal ranks are one communicator (with data parallelism only, torch's
    default group serves both).
    """
    sizes = {name: size for name, size in degrees(layout).items() if size > 1}
    kinds = [("tp",), ("cp",), ("dp",), ("cp", "dp"), ("pp",), tuple(sizes)]
    groups = {tuple(name for name in order if name in sizes and name in kind) for kind in kinds}
    inside = between = 0
    for group in groups - {()}:
        reach = max(group_stride(layout, name, order) * sizes[name] for name in group)
        count = 2 if group == ("pp",) else 1
        if reach <= domain:
            inside += count
        else:
            between += count
    more = [*(EXPERT_AXES if layout.ep > 1 else ())]
    more += ["ulysses", "cp"] if layout.ulysses > 1 and layout.cp > 1 else []
    for name in more:
        shape = worst_group(layout, name, 0, domain, order)
        inside += shape.ranks > 1 and shape.nodes == 1
        between += shape.nodes > 1
    return inside, between
