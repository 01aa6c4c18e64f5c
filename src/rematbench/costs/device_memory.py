"""Device memory that the framework's allocator never sees: driver, context, communicators."""

from rematbench.costs.collectives import degrees, group_stride
from rematbench.spec.cluster import Cluster
from rematbench.spec.constants import Calibration
from rematbench.spec.layout import Layout
from rematbench.spec.system import System


def non_torch_bytes(
    cluster: Cluster, layout: Layout, system: System, calibration: Calibration
) -> int:
    """Device bytes outside torch's allocator: bytes withheld by the driver, the CUDA context, and
    NCCL's buffers for each communicator of the layout; or the cluster file's measured bytes."""
    if cluster.non_torch_bytes is not None:
        return cluster.non_torch_bytes
    gpu, common = calibration.gpu(cluster.generation), calibration.common
    inside, between = communicators(layout, cluster.gpus_per_node, system.rank_order)
    buffers = inside * common.communicator_node_bytes + between * common.communicator_network_bytes
    return int(gpu.withheld_bytes + gpu.context_bytes + buffers)


def communicators(layout: Layout, gpus_per_node: int, order: tuple[str, ...]) -> tuple[int, int]:
    """Numbers of a rank's communicators: (within a node, over several nodes).

    A rank has the tensor, context, data, data-with-context and pipeline groups and the group of all
    ranks; the first and the last stage share one more group for the embedding.  Groups with equal
    ranks are one communicator (as torch's default group serves a purely data-parallel run).
    """
    sizes = {name: size for name, size in degrees(layout).items() if size > 1}
    asked = [("tp",), ("cp",), ("dp",), ("cp", "dp"), ("pp",), tuple(sizes)]
    groups = {tuple(name for name in order if name in sizes and name in kind) for kind in asked}
    inside = between = 0
    for group in groups - {()}:
        reach = max(group_stride(layout, name, order) * sizes[name] for name in group)
        count = 2 if group == ("pp",) else 1
        if reach <= gpus_per_node:
            inside += count
        else:
            between += count
    return inside, between
