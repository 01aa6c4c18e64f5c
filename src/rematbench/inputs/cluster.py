"""The cluster: GPUs, the links inside a node, the network between nodes, host memory."""

from typing import Annotated

from msgspec import Meta, Struct

from rematbench.workload import NonNegativeInt

Rate = Annotated[float, Meta(ge=1.0, le=1e21)]
Bytes = Annotated[int, Meta(gt=0, le=1 << 60)]
Count = Annotated[int, Meta(gt=0, le=1 << 16)]
Share = Annotated[float, Meta(gt=0.0, le=1.0)]


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One homogeneous cluster.  Rates are per direction; `generation` names the GPU constants.

    `host_bytes`: host memory of one node.
    `nvlink_domain`: GPUs that one NVLink fabric connects (None: those of a node).  Host memory,
    NICs and PCIe stay those of a node.
    `non_torch_bytes`: device bytes measured for driver, CUDA context and NCCL, which are outside
    torch's allocator (None: computed from the layout by costs/states.py).
    `pcie_gpus_per_link`: GPUs that share one host link; a single rank on a link gets its full rate.
    `d2h_beside_h2d`, `h2d_beside_d2h`: the share of its rate that a copy keeps while a copy in the
    opposite direction runs.  Published only for A100; for PCIe 5 (Hopper and Blackwell) measured on
    one H200 (results/measured/gpu).
    `put_s`: seconds in which a proxy on the host sends a token of DeepEP or HybridEP to another
    node for one GPU (0: GPUs send by themselves, at the rate of the NIC).
    `dram_bytes_per_s`: the memory rate of one of the `numa_nodes` (None: never the limit).
    `host_other_bytes`: host bytes of a node that a training job does not account for: the system's,
    the processes' own, the page cache (None: an estimate, costs/bind.py, `host_room_bytes`).
    `host_update_parameters_per_s`: parameters per second that all ranks of a node update together
    if AdamW runs on the node's CPUs, each rank on its own cores (None: not measured; plans with an
    optimizer in host memory then have bytes but no time).
    `fp32_flop_per_s`, `tf32_flop_per_s`, `fp64_flop_per_s`: dense peak of matrix products in these
    precisions (None: the generation's share of `peak_flop_per_s`, which is that of 16 bits).
    `roofline`: no rate of this GPU is published: its kernels run at the shares of the generation's
    peaks, and a band is that of a GPU that no row has.
    `constants`: names of entries of config/calibration.yaml for this cluster, of which the first
    existing entry applies (load.py sets the field).
    """

    name: str
    gpu: str
    generation: str
    peak_flop_per_s: Rate
    fp32_flop_per_s: Rate | None = None
    tf32_flop_per_s: Rate | None = None
    fp64_flop_per_s: Rate | None = None
    hbm_bytes: Bytes
    hbm_bytes_per_s: Rate
    non_torch_bytes: NonNegativeInt | None = None
    gpus_per_node: Count
    nvlink_domain: Count | None = None
    nvlink_bytes_per_s: Rate
    nics_per_node: Count
    nic_bytes_per_s: Rate
    put_s: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    pcie_bytes_per_s: Rate
    pcie_gpus_per_link: Count = 1
    d2h_beside_h2d: Share = 1.0
    h2d_beside_d2h: Share = 1.0
    dram_bytes_per_s: Rate | None = None
    numa_nodes: Count = 2
    host_bytes: Bytes
    host_other_bytes: NonNegativeInt | None = None
    host_update_parameters_per_s: Rate | None = None
    roofline: bool = False
    constants: tuple[str, ...] = ()
    sources: dict[str, str] = {}

    @property
    def flop_per_byte(self) -> float:
        """The balance of the GPU: dense 16-bit FLOP/s over HBM bytes/s."""
        return self.peak_flop_per_s / self.hbm_bytes_per_s

    @property
    def node_network_bytes_per_s(self) -> float:
        """The rate of all NICs of one node together, per direction."""
        return self.nics_per_node * self.nic_bytes_per_s

    def domain(self, gpus: int) -> int:
        """The GPUs of a job of `gpus` GPUs in one NVLink domain.

        A job that does not fill whole domains has equal parts in all of its domains: as many whole
        nodes in each as divide the job (Slurm's `--segment` of topology/block)."""
        node, most = self.gpus_per_node, self.nvlink_domain or self.gpus_per_node
        if gpus <= most or gpus % most == 0:
            return most
        return max((n for n in range(node, most + 1, node) if gpus % n == 0), default=node)

    def host_link_bytes_per_s(self, ranks: int) -> float:
        """One GPU's share of the host link, per direction, with `ranks` ranks on a node."""
        return self.pcie_bytes_per_s / min(self.pcie_gpus_per_link, ranks)

    def socket_bytes_per_s(self, ranks: int) -> float:
        """One GPU's share of its socket's memory rate, with `ranks` ranks on a node.  Ranks fill
        the sockets in order, so the first socket has as many ranks as it has GPUs."""
        if self.dram_bytes_per_s is None:
            return float("inf")
        return self.dram_bytes_per_s / min(ranks, -(-self.gpus_per_node // self.numa_nodes))
