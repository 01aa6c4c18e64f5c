"""Round constants for tests of the cost model: literal expectations never move with a new fit."""

from msgspec.structs import replace

from rematbench.inputs.constants import (
    Calibration,
    CommonConstants,
    GpuConstants,
    NetworkConstants,
    SystemConstants,
    shipped_kernels,
)

GPU = GpuConstants(
    sm_count=100.0,
    tile_rows=128.0,
    tile_columns=256.0,
    gemm_efficiency=0.5,
    gemm_tail_waves=0.0,
    gemm_half_k=0.0,
    hbm_efficiency=0.5,
    withheld_bytes=0.0,
    context_bytes=0.0,
)
NETWORK = NetworkConstants(
    nvlink_efficiency=1.0,
    nic_efficiency=0.5,
    ring_nics=8.0,
    nvlink_mesh=0.0,
    kernel_scale=1.0,
    host_ranks=8.0,
)
SYSTEM = SystemConstants(
    kernel_scale=1.0, gap_s=0.0, host_launch_s=0.0, tp_stall=0.5, dp_stall=0.25
)
COMMON = CommonConstants(
    nccl_base_s=(0.0,),
    nccl_nvlink_hop_s=(0.0,),
    nccl_network_hop_s=(0.0,),
    nccl_bandwidth_share=(1.0,),
    pcie_efficiency=0.5,
    copy_latency_s=0.0,
    optimizer_extra_bytes=0.0,
    communicator_node_bytes=0.0,
    communicator_network_bytes=0.0,
    graph_bytes_share=0.25,
    host_system_share=0.0,
    dram_efficiency=1.0,
)
ROUND = Calibration(
    gpus={"hopper": GPU, "ampere": GPU},
    networks={"default": NETWORK},
    systems={"default": SYSTEM},
    common=COMMON,
    kernels=shipped_kernels(),
)


def instant_hosts(calibration: Calibration) -> Calibration:
    """The calibration with hosts that take zero seconds to issue a kernel."""
    systems = calibration.systems.items()
    instant = {name: replace(stack, host_launch_s=0.0) for name, stack in systems}
    return replace(calibration, systems=instant)
