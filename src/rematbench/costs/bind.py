"""Seconds of one problem's operators, collectives, copies and updates.

Only this file and bind_kernels.py apply the pure formulas to a job's cluster, stack and layout.
"""

from functools import cached_property
from typing import Literal

from rematbench.costs import collectives, copies, formulas, states
from rematbench.costs.bind_kernels import KernelCosts
from rematbench.costs.copies import NO_TRAFFIC, CopyTraffic
from rematbench.costs.operators.ops import Comm
from rematbench.inputs.layout import Layout
from rematbench.inputs.recipes import holds_copies

CopyDirection = Literal["d2h", "h2d"]


class CostModel(KernelCosts):
    """Seconds and bytes of one rank's kernels and traffic."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._comms: dict[tuple[Comm, int | collectives.GroupShape], float] = {}
        """Seconds of collectives, once by pipeline stage and once by the shape of the group."""
        self._copies: dict[tuple[CopyDirection, CopyTraffic], float] = {}
        """Rates of copies in bytes/s, by direction and concurrent traffic."""

    @cached_property
    def nvlink_bytes_per_s(self) -> float:
        """The bytes/s that one GPU reaches over NVLink, per direction."""
        return self.cluster.nvlink_bytes_per_s * self.network.nvlink_efficiency

    @cached_property
    def nic_bytes_per_s(self) -> float:
        """The bytes/s that one GPU reaches over its share of the node's NICs, per direction."""
        share = self.cluster.node_network_bytes_per_s / self.cluster.gpus_per_node
        return share * self.network.nic_efficiency

    @cached_property
    def domain(self) -> int:
        return self.cluster.domain(self.layout.gpus)

    @cached_property
    def host_launch_s(self) -> float:
        """Seconds that the host needs for one launch. They grow if more ranks of a tensor-parallel
        group issue at the same time on a node than its cores can serve (`host_ranks`)."""
        ranks = min(self.layout.tp, self.cluster.gpus_per_node)
        seconds = self.stack.host_launch_s * max(1.0, ranks / self.network.host_ranks)
        return seconds * self.system.scales.host

    def comm_s(self, comm: Comm, stage: int) -> float:
        """Seconds of a collective for the worst-placed group at a pipeline stage.

        Group `dp` contains the ranks over which ZeRO shards states (data- and context-parallel
        peers), group `replica` the ranks with equal shards.
        """
        key = (comm, stage)
        if key not in self._comms:
            shape = self.group(comm.group, stage)
            if (comm, shape) not in self._comms:
                self._comms[comm, shape] = self._collective_s(comm, shape)
            self._comms[key] = self._comms[comm, shape]
        return self._comms[key]

    def _collective_s(self, comm: Comm, shape: collectives.GroupShape) -> float:
        nvlink = self._group_nvlink_bytes_per_s(shape.fewest_per_node)
        nic = self.nic_bytes_per_s
        ring = collectives.ring_bytes_per_s(
            shape.fewest_per_node, shape.nodes, nvlink, nic, self.network.ring_nics
        )
        size, nodes, common = shape.ranks, shape.nodes, self.common
        match comm.kind:
            case "all_gather" | "reduce_scatter" | "all_reduce":
                steps = (size - 1) * (2.0 if comm.kind == "all_reduce" else 1)
                seconds = collectives.ring_steps_s(steps, size, nodes, comm.nbytes, ring, common)
                if comm.kind == "all_gather" and comm.group in ("dp", "edp"):
                    seconds += size * self.system.zero.broadcast_s
            case "all_to_all":
                seconds = collectives.all_to_all_s(
                    comm.nbytes,
                    size,
                    shape.fewest_per_node,
                    nodes,
                    nvlink,
                    self._exchange_bytes_per_s(comm),
                    common,
                    self._copies_of(comm),
                )
            case "amax":
                seconds = collectives.tree_s(size, nodes)
            case "ring":
                seconds = collectives.ring_exchange_s(comm.nbytes, size, nodes, nvlink, nic, common)
        return seconds * self.system.scales.communication

    def _exchange_bytes_per_s(self, comm: Comm) -> float:
        """The bytes/s of one GPU's NIC in an all-to-all. If the dispatcher sends single tokens and
        GPUs cannot send by themselves, the host's proxy limits it (`put_s` seconds per token)."""
        if not (self.cluster.put_s and self._copies_of(comm)):
            return self.nic_bytes_per_s
        token_bytes = self.workload.model.hidden * self.workload.element_bytes
        return min(self.nic_bytes_per_s, token_bytes / self.cluster.put_s)

    def _copies_of(self, comm: Comm) -> int:
        """The copies of a token (one per active expert) if the dispatcher sends one of them to each
        node, which makes the others; 0 if every copy is sent."""
        experts = self.workload.model.experts
        once = self.system.experts.dispatcher in ("deepep", "hybridep")
        return experts.active if experts and once and comm.group == "ep" else 0

    def _group_nvlink_bytes_per_s(self, ranks_in_domain: int) -> float:
        """The NVLink rate of a GPU in a group with `ranks_in_domain` ranks in its domain."""
        mesh = self.network.nvlink_mesh
        return self.nvlink_bytes_per_s * collectives.nvlink_share(
            ranks_in_domain, self.domain, mesh
        )

    def group(self, group: str, stage: int) -> collectives.GroupShape:
        """The placement of the worst-placed group of a kind on NVLink domains."""
        return collectives.worst_group(
            self._placement,
            "state" if group == "dp" else group,
            stage,
            self.domain,
            self.system.parallel.rank_order,
        )

    @cached_property
    def _placement(self) -> Layout:
        names = ("tp", "tp_columns", "cp", "pp", "dp", "ulysses", "ep", "etp", "shard_degree")
        return Layout(**{name: getattr(self.layout, name) for name in names})

    def p2p_s(
        self, nbytes: int, from_stage: int, to_stage: int, *, replicated: bool = False
    ) -> float:
        """Seconds of a rank's send to its peer in another stage, for the worst-placed pair.

        If the tensor is `replicated` over tensor-parallel ranks, each of them sends a part, and the
        receivers gather the parts over NVLink (scatter/gather, Narayanan et al. 2021, arXiv
        2104.04473, section 4.1; DeepSpeed's partitioned pipeline sends do the same)."""
        if replicated and self.layout.tp > 1:
            gathered = self.comm_s(Comm("all_gather", "tp", nbytes), to_stage % self.layout.pp)
            return self._send_s(nbytes // self.layout.tp, from_stage, to_stage) + gathered
        return self._send_s(nbytes, from_stage, to_stage)

    def crosses(self, from_stage: int, to_stage: int) -> bool:
        """Whether any pair of peers of two stages is in different NVLink domains."""
        return collectives.crosses_nodes(
            self._placement,
            from_stage % self.layout.pp,
            to_stage % self.layout.pp,
            self.domain,
            self.system.parallel.rank_order,
        )

    def _send_s(self, nbytes: int, from_stage: int, to_stage: int) -> float:
        crosses, nvlink = self.crosses(from_stage, to_stage), self._group_nvlink_bytes_per_s(2)
        nic, common = self.nic_bytes_per_s, self.common
        seconds = collectives.point_to_point_s(nbytes, crosses, nvlink, nic, common)
        return seconds * self.system.scales.communication

    def copy_s(
        self, nbytes: float, direction: CopyDirection, traffic: CopyTraffic = NO_TRAFFIC
    ) -> float:
        """Seconds of a copy to or from pinned host memory while `traffic` runs."""
        key = (direction, traffic)
        if key not in self._copies:
            self._copies[key] = self.copy_bytes_per_s(direction, traffic)
        return copies.host_copy_s(nbytes, self._copies[key], self.common)

    def copy_bytes_per_s(
        self, direction: CopyDirection = "d2h", traffic: CopyTraffic = NO_TRAFFIC
    ) -> float:
        """The bytes/s of a copy while `traffic` runs: the lower of the GPU's share of the host link
        and its share of the socket's DRAM rate."""
        cluster, common = self.cluster, self.common
        ranks = min(cluster.gpus_per_node, self.layout.gpus)
        outwards = direction == "d2h"
        link = cluster.host_link_bytes_per_s(ranks)
        dram = cluster.socket_bytes_per_s(ranks) * common.dram_efficiency / common.pcie_efficiency
        keeps = cluster.d2h_beside_h2d if outwards else cluster.h2d_beside_d2h
        return copies.shared_link_bytes_per_s(
            min(link, dram),
            min(link * keeps, dram / 2),
            self.nic_bytes_per_s,
            traffic.two_way_share,
            traffic.sent_per_d2h if outwards else traffic.received_per_h2d,
        )

    def network_bytes(self, comm: Comm, stage: int) -> float:
        """Bytes of a collective that the busiest GPU sends over its link to the NIC."""
        shape = self.group(comm.group, stage)
        if shape.nodes == 1:
            return 0.0
        most = min(shape.fewest_per_node, self.network.ring_nics)
        copies = self._copies_of(comm)
        return collectives.network_bytes(comm.kind, comm.nbytes, shape, most, copies)

    def device_copy_s(self, nbytes: int) -> float:
        """Seconds of a copy inside the device (SPLIT, JOIN), which reads and writes each byte."""
        return float(self._memory_s(2.0 * nbytes)) + self.stack.gap_s

    def optimizer_s(self, parameters_per_rank: int) -> float:
        """Seconds of gradient clipping and the update of a rank's parameters on the GPU."""
        each = states.optimizer_traffic_bytes(self.system, self.common)
        return float(self._memory_s(parameters_per_rank * each))

    def quantise_s(self, weights: int) -> float:
        """Seconds to quantise `weights` weights once per step, if the rank keeps the copies. The
        parameters are read once, and again in each pass that looks for the largest element; all
        quantised copies are written."""
        held = holds_copies(self.workload, self.system, self.layout.zero_stage)
        if self.recipe is None or not held:
            return 0.0
        read = self.system.states.param_bytes * (1 + self.recipe.amax_passes)
        return float(self._memory_s(weights * (read + self.recipe.copies[self.cluster.generation])))

    @cached_property
    def host_room_bytes(self) -> int:
        """Host bytes of a node that training may pin: all except those of the system and of the
        processes. The bytes of processes were measured with an optimizer on the host, and are
        estimated without one."""
        whole, measured = self.cluster.host_bytes, self.cluster.host_other_bytes
        if measured is not None:
            return whole - measured
        other = whole * self.common.host_system_share
        if self.system.host.optimizer_on_host:
            most = whole * self.common.host_other_share
            other = max(other, min(self.common.host_other_bytes, most))
        return int(whole - other)

    def host_update_s(self, parameters_per_rank: int) -> float:
        """Seconds of the update of a rank's parameters on the host, without the cast of the weights
        (`host_cast_s`). DeepSpeed binds each rank to its GPU's share of the node's cores; if torch
        updates tensors (`host_tensors`), the running ranks share all cores. 0 for a cluster without
        a rate, whose step is not timed (`not_timed`)."""
        rate, ranks = self.cluster.host_update_parameters_per_s, self.cluster.gpus_per_node
        ranks = min(ranks, self.layout.gpus) if self.system.host.host_tensors else ranks
        return parameters_per_rank * ranks / rate if rate else 0.0

    def host_cast_s(self, parameters: int) -> float:
        """Seconds in which the host casts a rank's updated weights to compute precision: it reads
        master weights and writes weights at the rank's share of the DRAM rate."""
        width = self.system.host.host_grad_bytes + self.system.states.param_bytes
        ranks = min(self.cluster.gpus_per_node, self.layout.gpus)
        rate = self.cluster.socket_bytes_per_s(ranks) * self.common.dram_efficiency
        return width * parameters / rate

    def visiting_share(self, *, two_way: bool) -> float:
        """The share of optimizer states in host memory that should visit the device, so that the
        host's updates and the visits' copies end together: f* = t_cpu / (t_cpu + t_copy). Visits
        also delay the host, so t_copy is reduced by that delay. `two_way`: copies to the device
        overlap copies to the host. 1 on a cluster without an update rate of the host."""
        if not self.cluster.host_update_parameters_per_s:
            return 1.0
        many = 10**9  # so many that the copies' latency does not matter
        cpu_s = self.host_update_beside_s(many, 0.0)
        states = self.system.states.optimizer_bytes * many
        traffic = NO_TRAFFIC._replace(two_way_share=float(two_way))
        up_s, down_s = self.copy_s(states, "h2d", traffic), self.copy_s(states, "d2h", traffic)
        copy_s = max(up_s, down_s) if two_way else up_s + down_s
        delay_s = self.common.visit_delay_share * self.copy_s(states, "h2d")
        return min(1.0, cpu_s / max(cpu_s, cpu_s + copy_s - delay_s))

    def host_update_beside_s(self, parameters: int, visiting_bytes: float) -> float:
        """Seconds of the update of a rank's parameters on the host while copies run: a share of the
        summed seconds of update, cast and copy to the device, plus a share of the seconds of the
        visits' copies (`visiting_bytes` per parameter that the host updates)."""
        common = self.common
        alone_s = self.host_update_s(parameters) + self.host_cast_s(parameters)
        alone_s += self.copy_s(self.system.states.param_bytes * parameters, "h2d")
        visits_s = self.copy_s(visiting_bytes * parameters, "h2d") if visiting_bytes else 0.0
        return common.host_beside_share * alone_s + common.visit_delay_share * visits_s

    def overlapped_s(self, seconds: float, concurrent_s: float, stream: str) -> float:
        """Seconds of compute that overlaps with `concurrent_s` seconds of work on `stream`."""
        slowdown = self.overlap_factor(stream)
        return formulas.overlapped_s(seconds, concurrent_s, slowdown)

    def stall_s(self, comm: Comm, stage: int, compute_s: float = float("inf")) -> float:
        """Seconds by which a collective and `compute_s` seconds of concurrent compute delay each
        other."""
        stall = self.overlap_factor(comm.stream) - 1.0
        return stall * min(compute_s, self.comm_s(comm, stage))

    def overlap_factor(self, stream: str) -> float:
        """The factor by which compute is slower while work on `stream` runs.

        NCCL's kernels take SMs and HBM rate from compute. The factor is 1 for point-to-point
        transfers and copies, which run on copy engines, and if launches block, as nothing overlaps
        then.
        """
        if self.system.host.launch_blocking:
            return 1.0
        tp_stall, dp_stall = self.stack.tp_stall, self.stack.dp_stall
        stalls = {"tp": tp_stall, "cp": tp_stall, "ep": tp_stall, "dp": dp_stall}
        return 1.0 + stalls.get(stream, 0.0)
