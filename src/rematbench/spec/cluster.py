"""Where it runs: GPUs, the links inside a node, the network between nodes, host memory."""

from typing import Annotated

from msgspec import Meta, Struct

from rematbench.workload import NonNegativeInt

Rate = Annotated[float, Meta(ge=1.0, le=1e21)]
Bytes = Annotated[int, Meta(gt=0, le=1 << 60)]
Count = Annotated[int, Meta(gt=0, le=1 << 16)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One homogeneous cluster.  Rates are per direction; `generation` names the GPU constants.

    `host_bytes` is the memory of a node; `non_torch_bytes` is what driver, CUDA context and NCCL
    were measured to take from `hbm_bytes` before the allocator sees any (None: by the rule of
    cost/device_memory.py, from the layout); `pcie_gpus_per_link` is how many GPUs share one host
    link; `d2h_beside_h2d` and `h2d_beside_d2h` the share of its rate that a copy keeps while one in
    the other direction runs; `dram_bytes_per_s` the memory rate of one of the `numa_nodes` (None:
    never what binds).  `host_update_parameters_per_s`: how many parameters all ranks of a node
    update per second where AdamW runs on its CPUs, each rank on cores of its own (None: not
    measured, so plans with an optimizer in host memory have bytes and no time).  `constants`:
    entries of config/calibration.yaml that are this cluster's, the first that is there counts
    (load.py sets it).
    """

    name: str
    gpu: str
    generation: str
    peak_flop_per_s: Rate
    hbm_bytes: Bytes
    hbm_bytes_per_s: Rate
    non_torch_bytes: NonNegativeInt | None = None
    gpus_per_node: Count
    nvlink_bytes_per_s: Rate
    nics_per_node: Count
    nic_bytes_per_s: Rate
    pcie_bytes_per_s: Rate
    pcie_gpus_per_link: Count = 1
    d2h_beside_h2d: Share = 1.0
    h2d_beside_d2h: Share = 1.0
    dram_bytes_per_s: Rate | None = None
    numa_nodes: Count = 2
    host_bytes: Bytes
    host_update_parameters_per_s: Rate | None = None
    constants: tuple[str, ...] = ()
    sources: dict[str, str] = {}

    @property
    def node_network_bytes_per_s(self) -> float:
        """All NICs of one node together, per direction."""
        return self.nics_per_node * self.nic_bytes_per_s

    @property
    def host_link_bytes_per_s(self) -> float:
        """One GPU's share of the host link, per direction."""
        return self.pcie_bytes_per_s / self.pcie_gpus_per_link
