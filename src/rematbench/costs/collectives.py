"""Seconds of collectives, from the placement of process groups on nodes.

A node here is an NVLink domain: on clusters with a domain larger than a node, that domain.
Ranks are numbered with tp fastest, then cp, dp, pp (`System.rank_order`).  A group is a first rank,
a stride and a size.  Seconds depend on the number of the group's ranks on each node.
"""

from functools import lru_cache
from math import prod

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rematbench.inputs.constants import CommonConstants
from rematbench.inputs.kernel_rates import Quantity
from rematbench.inputs.layout import Layout
from rematbench.inputs.shapes import reached_share


class GroupShape(Struct, frozen=True):
    """The placement on nodes of the worst-placed group of one kind.

    `ranks`: ranks of the group; `fewest_per_node`: the smallest number of its ranks on one of its
    nodes; `nodes`: the number of nodes with a rank of the group.
    """

    ranks: int
    fewest_per_node: int
    nodes: int


def degrees(layout: Layout) -> dict[str, int]:
    """Ranks per axis.  Ulysses ranks are neighbours inside the axis `cp`, and the ranks of a
    matrix's columns inside the axis `tp`."""
    inner, both = layout.cp * layout.ulysses, layout.tp * layout.tp_columns
    return {"tp": both, "cp": inner, "dp": layout.dp // layout.ulysses, "pp": layout.pp}


def group_stride(layout: Layout, group: str, order: tuple[str, ...]) -> int:
    """Distance in ranks between neighbours of a group: the product of the degrees before it in
    `order`."""
    sizes = degrees(layout)
    return prod(sizes[name] for name in order[: order.index(group)])


def group_ranks(
    layout: Layout, group: str, stage: int, order: tuple[str, ...]
) -> list[tuple[int, ...]]:
    """All groups of a kind at a pipeline stage, as global rank numbers.

    With Ulysses inside context parallelism, neighbours on the axis `cp` form the groups `ulysses`,
    and the ranks of equal place in these the groups `cp`; so do `columns` inside `tp`.
    The data- and context-parallel peers are cut into groups `state` of neighbours, over which ZeRO
    shards states (`Layout.state_shards`); the ranks of equal place in them form groups `replica`.
    Experts fold onto the ranks of a stage: neighbours form the groups `etp`, the ranks of equal
    place in neighbouring groups `ep`, and all ranks of equal place in those are peers
    (Megatron-core's parallel_state.py, expert_decoder_rank_generator).  They are cut as the peers
    of other states are: into `edp` (`Layout.expert_shards`) and `expert_replica`.
    """
    return [tuple(row) for row in _ranks(layout, group, stage, order).tolist()]


def _ranks(layout: Layout, group: str, stage: int, order: tuple[str, ...]) -> NDArray[np.int64]:
    """`group_ranks` as an array: groups by ranks."""
    if group == "expert_replica" or group in EXPERT_AXES:
        return _expert_ranks(layout, group, stage, order)
    sizes = degrees(layout)
    wider = {"state": ("cp", "dp"), "replica": ("cp", "dp"), "ulysses": ("cp",), "columns": ("tp",)}
    wider["stage"] = ("tp", "cp", "dp")
    members = wider.get(group, (group,))
    shape = [sizes[name] for name in order]
    grid = np.arange(int(np.prod(shape))).reshape(shape[::-1])  # slowest first
    axes = list(order[::-1])
    if group != "pp":
        grid = np.take(grid, stage, axis=axes.index("pp"))
        axes.remove("pp")
    inside = [axes.index(name) for name in axes if name in members]
    outside = [i for i in range(len(axes)) if i not in inside]
    size = prod(grid.shape[i] for i in inside)
    rows = grid.transpose(outside + inside).reshape(-1, size)
    if group == "ulysses" or (group == "cp" and layout.cp > 1):
        return _cut(rows, layout.ulysses, replicas=group == "cp")
    if group in ("tp", "columns"):
        return _cut(rows, layout.tp_columns, replicas=group == "tp")
    if group not in ("state", "replica"):
        return rows
    return _cut(rows, layout.state_shards, replicas=group == "replica")


def _cut(rows: NDArray[np.int64], shards: int, *, replicas: bool) -> NDArray[np.int64]:
    """Groups of `shards` neighbours in the rows, or the ranks of equal place in these."""
    cut = rows.reshape(len(rows), -1, shards)
    if replicas:
        cut = cut.transpose(0, 2, 1)
    return cut.reshape(-1, cut.shape[2])


EXPERT_AXES = ("edp", "ep", "etp")
"""The groups of experts, the slowest first."""


def _expert_ranks(
    layout: Layout, group: str, stage: int, order: tuple[str, ...]
) -> NDArray[np.int64]:
    """The groups of experts of a kind at a pipeline stage: groups by ranks."""
    everyone = np.sort(_ranks(layout, "pp", 0, order)[:, stage])
    grid = everyone.reshape(layout.expert_dp, layout.ep, layout.expert_tp)
    replicas = group == "expert_replica"
    axis = EXPERT_AXES.index("edp" if replicas else group)
    rows = np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])
    return _cut(rows, layout.expert_shards, replicas=replicas) if axis == 0 else rows


@lru_cache(maxsize=4096)
def worst_group(
    layout: Layout, group: str, stage: int, gpus_per_node: int, order: tuple[str, ...]
) -> GroupShape:
    """The worst-placed group: among groups on several nodes (if any), the group with the fewest
    ranks on a node."""
    nodes = _ranks(layout, group, stage, order) // gpus_per_node
    numbers = np.arange(len(nodes))[:, None] * (nodes.max() + 1) + nodes  # of (group, node)
    places, counts = np.unique(numbers, return_counts=True)
    first = np.flatnonzero(np.diff(places // (nodes.max() + 1), prepend=-1))
    fewest = np.minimum.reduceat(counts, first)
    touched = np.diff(first, append=len(places))
    worst = np.lexsort((-touched, fewest, touched == 1))[0]
    return GroupShape(nodes.shape[1], int(fewest[worst]), int(touched[worst]))


@lru_cache(maxsize=4096)
def crosses_nodes(
    layout: Layout, from_stage: int, to_stage: int, gpus_per_node: int, order: tuple[str, ...]
) -> bool:
    """Whether any pair of pipeline peers of two stages sits on different nodes."""
    groups = _ranks(layout, "pp", 0, order) // gpus_per_node
    return bool(np.any(groups[:, from_stage] != groups[:, to_stage]))


def nvlink_share(fewest_per_node: Quantity, gpus_per_node: Quantity, mesh: Quantity) -> Quantity:
    """Share of a GPU's NVLink that a group can use: 1 behind a switch; in a mesh of pairs only the
    links to the group's GPUs, (ranks - 1) / (GPUs - 1).

    Source: NVIDIA HGX H100 and A100 4-GPU boards: no NVSwitch, 6 (4) links between each pair.
    """
    pairs = np.maximum(np.subtract(fewest_per_node, 1), 1) / np.maximum(
        np.subtract(gpus_per_node, 1), 1
    )
    return np.where(np.asarray(mesh) > 0, pairs, 1.0)[()]


def ring_bytes_per_s(
    fewest_per_node: Quantity,
    nodes: Quantity,
    nvlink_bytes_per_s: Quantity,
    nic_bytes_per_s: Quantity,
    ring_nics: Quantity,
) -> Quantity:
    """Rate of a ring: NVLink inside a node, otherwise the NICs of its ranks.

    A ring over several nodes enters and leaves each node once per channel, through the NICs of the
    ring's ranks on that node: (fewest ranks on a node of the ring) x NIC, or fewer NICs where NCCL
    does not use all of them (`ring_nics`).
    Source: NCCL's ring channels, one NIC per GPU; `ring_nics`: config/calibration.yaml.
    The arguments are reached rates, with efficiencies applied.
    """
    network = np.minimum(
        np.minimum(fewest_per_node, ring_nics) * nic_bytes_per_s, nvlink_bytes_per_s
    )
    rate: Quantity = np.where(np.asarray(nodes) > 1, network, nvlink_bytes_per_s)
    return rate


def ring_steps_s(
    steps: Quantity,
    ranks: Quantity,
    nodes: Quantity,
    nbytes: Quantity,
    bytes_per_s: Quantity,
    common: CommonConstants,
) -> Quantity:
    """Seconds of a ring of `steps` hops, each passing nbytes / ranks, by the faster of NCCL's LL128
    and Simple protocols: base + hops inside nodes + hops between nodes + wire time.

    An all-gather or a reduce-scatter of `nbytes` gathered bytes has ranks - 1 steps, so (ranks - 1)
    / ranks of the bytes over each link; an all-reduce is both in one call, 2 (ranks - 1) steps.

    Source: NCCL 2.18 src/graph/tuning.cc, ncclTopoTuneModel (baseLat, hwLat, LL128 at 92 %);
    Thakur, Rabenseifner and Gropp 2005; the bus rate of nccl-tests.
    """
    between = np.where(np.asarray(nodes) > 1, steps * nodes / ranks, 0.0)
    within = steps - between
    wire = steps * nbytes / ranks / bytes_per_s
    choices = [
        base + within * near + between * far + wire / share
        for base, near, far, share in zip(
            common.nccl_base_s,
            common.nccl_nvlink_hop_s,
            common.nccl_network_hop_s,
            common.nccl_bandwidth_share,
            strict=True,
        )
    ]
    fastest: Quantity = np.minimum.reduce(np.broadcast_arrays(*choices))
    return np.where(np.asarray(ranks) > 1, fastest, 0.0)[()]


TREE_S = (6.8e-6, 0.6e-6, 5.0e-6)
"""Seconds of NCCL's tree with its protocol for few bytes (LL): base, hop inside a node, hop between
nodes (NCCL 2.18 src/graph/tuning.cc, baseLat and hwLat)."""


def tree_s(ranks: Quantity, nodes: Quantity) -> Quantity:
    """Seconds of an all-reduce of a few numbers: up and down a tree of nodes, each of which is a
    chain of its ranks.

    Source: NCCL 2.18 src/graph/tuning.cc, ncclTopoTuneModel; between nodes LL's hop inside a node
    takes 1.8 times as long there.
    """
    base, near, far = TREE_S
    inside = np.where(np.asarray(nodes) > 1, 1.8 * near, near)
    hops = (np.divide(ranks, nodes) - 1) * inside + np.log2(nodes) * far
    return np.where(np.asarray(ranks) > 1, base + 2 * hops, 0.0)[()]


def all_to_all_s(
    nbytes: Quantity,
    ranks: Quantity,
    fewest_per_node: Quantity,
    nodes: Quantity,
    nvlink_bytes_per_s: Quantity,
    nic_bytes_per_s: Quantity,
    common: CommonConstants,
    copies: int = 0,
) -> Quantity:
    """Seconds of an all-to-all of one rank's `nbytes`: the bytes for ranks of its node go over
    NVLink, and at the same time the other bytes go over the rank's NIC.  Source: NCCL's grouped
    send/receive (one NIC per GPU).  `copies`: the bytes are one copy of each token for each rank
    that has one of so many of its experts; a node receives one of them and passes the others on
    over NVLink (0: each copy is sent by itself)."""
    alone = np.subtract(fewest_per_node, 1) / ranks
    spread = np.subtract(fewest_per_node, 1) / fewest_per_node
    inside = nbytes * np.where(np.asarray(copies) > 0, spread, alone) / nvlink_bytes_per_s
    sent = sent_share(ranks, fewest_per_node, nodes, copies)
    outside = nbytes * sent / nic_bytes_per_s
    wire = np.maximum(inside, np.where(np.asarray(nodes) > 1, outside, 0.0))
    far, near = common.nccl_network_hop_s[-1], common.nccl_nvlink_hop_s[-1]
    latency = common.nccl_base_s[-1] + np.where(np.asarray(nodes) > 1, far, near)
    return np.where(np.asarray(ranks) > 1, wire + latency, 0.0)[()]


def sent_share(
    ranks: Quantity, fewest_per_node: Quantity, nodes: Quantity, copies: int
) -> Quantity:
    """Share of an all-to-all's bytes that leave a node.  Of the ranks that have some of `copies`
    of a token, all equally likely, one for each of the other nodes with such a rank.

    Source: DeepEP (deepseek-ai/DeepEP, README: forwarding from network to NVLink).
    """
    reached = reached_share(nodes, copies) / reached_share(ranks, copies) if copies else 0.0
    others = np.subtract(nodes, 1) / nodes * reached
    alone = np.subtract(ranks, fewest_per_node) / ranks
    return np.where(np.asarray(copies) > 0, others, alone)[()]


def ring_exchange_s(
    nbytes: Quantity,
    ranks: Quantity,
    nodes: Quantity,
    nvlink_bytes_per_s: Quantity,
    nic_bytes_per_s: Quantity,
    common: CommonConstants,
) -> Quantity:
    """Seconds of ring attention's KV exchange: ranks - 1 sends of nbytes / ranks to the neighbour,
    paced by the slowest link, which is one rank's NIC if the ring leaves a node.

    Source: Liu et al. 2023 (arXiv 2310.01889).  The sends are point-to-point, so the NICs of the
    node's other ranks cannot help.
    """
    crosses = np.asarray(nodes) > 1
    rate = np.where(crosses, np.minimum(nic_bytes_per_s, nvlink_bytes_per_s), nvlink_bytes_per_s)
    hop = np.where(crosses, common.nccl_network_hop_s[-1], common.nccl_nvlink_hop_s[-1])
    send_s = common.nccl_base_s[-1] + hop + nbytes / ranks / rate
    return (np.subtract(ranks, 1) * send_s)[()]


def point_to_point_s(
    nbytes: Quantity,
    crosses_nodes: Quantity,
    nvlink_bytes_per_s: Quantity,
    nic_bytes_per_s: Quantity,
    common: CommonConstants,
) -> Quantity:
    """Seconds of one send and its receive: base + hop + bytes / link rate (between nodes: one
    NIC)."""
    crosses = np.asarray(crosses_nodes) > 0
    rate = np.where(crosses, nic_bytes_per_s, nvlink_bytes_per_s)
    hop = np.where(crosses, common.nccl_network_hop_s[-1], common.nccl_nvlink_hop_s[-1])
    return (common.nccl_base_s[-1] + hop + nbytes / rate)[()]


def network_bytes(
    kind: str, nbytes: float, shape: GroupShape, ring_nics: float, copies: int = 0
) -> float:
    """Bytes that the busiest GPU sends over its NIC (and receives) in a collective between nodes.
    `ring_nics` NICs of a node share the bytes of a ring; `copies`: as in `all_to_all_s`."""
    ranks = shape.ranks
    match kind:
        case "all_gather" | "reduce_scatter":
            return nbytes * (ranks - 1) / ranks / ring_nics
        case "all_reduce":
            return 2.0 * nbytes * (ranks - 1) / ranks / ring_nics
        case "all_to_all":
            return nbytes * float(sent_share(ranks, shape.fewest_per_node, shape.nodes, copies))
    return nbytes * (ranks - 1) / ranks
