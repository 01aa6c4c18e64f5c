"""The cluster: GPUs, links inside a node, the network between nodes, host memory."""

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
    `nvlink_domain`: GPUs that one NVLink fabric connects (None: the GPUs of a node).  Host memory,
    NICs and PCIe are per node in any case.
    `non_torch_bytes`: measured device bytes of driver, CUDA context and NCCL, which are outside
    torch's allocator (None: computed from the layout by costs/states.py).
    `pcie_gpus_per_link`: GPUs that share one host link; a single rank on a link gets its full rate.
    `d2h_beside_h2d`, `h2d_beside_d2h`: the share of its rate that a copy keeps while a copy in the
    opposite direction runs.  Published only for A100; for PCIe 5 (Hopper and Blackwell) measured on
    one H200 (results/measured/gpu).
    `put_s`: seconds that a proxy on the host needs to send a token of DeepEP or HybridEP to another
    node for one GPU (0: GPUs send by themselves, at the rate of the NIC).
    `dram_bytes_per_s`: the memory rate of one of the `numa_nodes` (None: never the limit).
    `host_other_bytes`: host bytes per node that the system, the processes themselves and the page
    cache take (None: estimated by `host_room_bytes` in costs/bind.py).
    `host_update_parameters_per_s`: parameters per second that all ranks of a node together update
    if AdamW runs on the node's CPUs, each rank on its own cores (None: not measured; plans with an
    optimizer in host memory then have bytes but no time).
    `fp32_flop_per_s`, `tf32_flop_per_s`, `fp64_flop_per_s`: dense peak of matrix products in these
    precisions (None: the generation's share of `peak_flop_per_s`, the dense peak in 16 bits).
    `roofline`: no rates are published for this GPU, so kernels run at the generation's shares of
    the peaks, and predictions get the wide band of an unknown GPU.
    `constants`: names of entries of config/calibration.yaml, of which the first existing one
    applies to this cluster (load.py sets the field).
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
        """The machine balance of the GPU: dense 16-bit FLOP/s over HBM bytes/s."""
        return self.peak_flop_per_s / self.hbm_bytes_per_s

    @property
    def node_network_bytes_per_s(self) -> float:
        """The summed rate of a node's NICs, per direction."""
        return self.nics_per_node * self.nic_bytes_per_s

    def domain(self, gpus: int) -> int:
        """How many GPUs of a job with `gpus` GPUs share an NVLink domain.

        A job that does not fill whole domains is spread equally over several: each gets the most
        whole nodes that divide the job (`--segment` of Slurm's topology/block)."""
        node, most = self.gpus_per_node, self.nvlink_domain or self.gpus_per_node
        if gpus <= most or gpus % most == 0:
            return most
        return max((n for n in range(node, most + 1, node) if gpus % n == 0), default=node)

    def host_link_bytes_per_s(self, ranks: int) -> float:
        """One GPU's share of the host link, per direction, with `ranks` ranks on a node."""
        return self.pcie_bytes_per_s / min(self.pcie_gpus_per_link, ranks)

    def socket_bytes_per_s(self, ranks: int) -> float:
        """One GPU's share of its socket's memory rate, with `ranks` ranks on a node.  Ranks fill
        the sockets in order, so the first socket is the most shared."""
        if self.dram_bytes_per_s is None:
            return float("inf")
        return self.dram_bytes_per_s / min(ranks, -(-self.gpus_per_node // self.numa_nodes))
