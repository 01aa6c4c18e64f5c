"""Bytes of a rank's parameters, gradients and optimizer states, traffic of the optimizer step, and
device memory outside the framework's allocator (driver, context, communicators).

ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): stage 1 shards the optimizer over data-parallel
(and context-parallel) ranks, stage 2 also the gradients, stage 3 also the parameters.  FSDP full
shard is stage 3.
"""

import numpy as np
from msgspec import Struct

from rematbench.costs.collectives import degrees, group_stride
from rematbench.spec.cluster import Cluster
from rematbench.spec.constants import Calibration, CommonConstants
from rematbench.spec.kernel_rates import Quantity
from rematbench.spec.layout import Layout
from rematbench.spec.system import System

OPTIMIZER_STAGE, GRADIENT_STAGE, PARAMETER_STAGE = 1, 2, 3


class StateBytes(Struct, frozen=True, kw_only=True):
    """Resident bytes of one rank's training states."""

    parameter: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of all states."""
        return self.parameter + self.gradient + self.optimizer


def shard(parameters: int, shards: int) -> int:
    """Parameters of the fullest rank, with `parameters` sharded over `shards` ranks."""
    return -(-parameters // shards)


def sharded_parameters(parameters: int, layout: Layout, since_stage: int) -> int:
    """Parameters on a rank of a state that ZeRO shards from stage `since_stage` on."""
    return shard(parameters, layout.state_shards if layout.zero_stage >= since_stage else 1)


def updated_parameters(parameters: int, layout: Layout) -> int:
    """Parameters that a rank's optimizer step updates."""
    return sharded_parameters(parameters, layout, OPTIMIZER_STAGE)


def state_bytes(parameters: int, layout: Layout, system: System) -> StateBytes:
    """Resident bytes for `parameters` of one rank (after tensor and pipeline parallelism).

    Transient gathered copies (ZeRO-3 layers, FSDP units) are not counted here.
    """
    held = sharded_parameters(parameters, layout, PARAMETER_STAGE)
    reduced = sharded_parameters(parameters, layout, GRADIENT_STAGE)
    updated = updated_parameters(parameters, layout)
    return StateBytes(
        parameter=held * system.param_bytes,
        gradient=reduced * system.grad_bytes,
        optimizer=updated * system.optimizer_bytes,
    )


def optimizer_traffic_bytes(
    parameters: Quantity,
    param_bytes: Quantity,
    grad_bytes: Quantity,
    optimizer_bytes: Quantity,
    common: CommonConstants,
) -> Quantity:
    """HBM bytes of clipping and one fused Adam step over `parameters` updated parameters.

    Gradients are read for the norm and again for the update; master weights and moments are read
    and written; compute parameters are written.  The stacks move `optimizer_extra_bytes` more per
    parameter (gradient zeroing and unscaling).
    Source: Kingma & Ba 2015 for the states; apex FusedAdam reads and writes each once.
    """
    per_parameter = 2.0 * grad_bytes + 2.0 * np.asarray(optimizer_bytes) + param_bytes
    return parameters * (per_parameter + common.optimizer_extra_bytes)


def non_torch_bytes(
    cluster: Cluster, layout: Layout, system: System, calibration: Calibration
) -> int:
    """Device bytes outside torch's allocator: bytes withheld by the driver, the CUDA context, and
    NCCL's buffers for each communicator of the layout; or the cluster file's measured bytes."""
    if cluster.non_torch_bytes is not None:
        return cluster.non_torch_bytes
    common = calibration.common
    inside, between = communicators(layout, cluster.gpus_per_node, system.rank_order)
    buffers = inside * common.communicator_node_bytes + between * common.communicator_network_bytes
    return int(calibration.outside_torch_bytes(cluster.generation) + buffers)


def communicators(layout: Layout, gpus_per_node: int, order: tuple[str, ...]) -> tuple[int, int]:
    """Numbers of a rank's communicators: (within a node, over several nodes).

    A rank has the tensor, context, data, data-with-context and pipeline groups and the group of all
    ranks; the first and the last stage share one more group for the embedding.  Groups with equal
    ranks are one communicator (torch's default group, for example, serves a run with data
    parallelism only).
    """
    sizes = {name: size for name, size in degrees(layout).items() if size > 1}
    kinds = [("tp",), ("cp",), ("dp",), ("cp", "dp"), ("pp",), tuple(sizes)]
    groups = {tuple(name for name in order if name in sizes and name in kind) for kind in kinds}
    inside = between = 0
    for group in groups - {()}:
        reach = max(group_stride(layout, name, order) * sizes[name] for name in group)
        count = 2 if group == ("pp",) else 1
        if reach <= gpus_per_node:
            inside += count
        else:
            between += count
    return inside, between
