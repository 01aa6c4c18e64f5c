"""Seconds of collectives, from the placement of process groups on nodes.

In this file a node is an NVLink domain, which may be larger than a machine.  Ranks are numbered
with tp fastest, then cp, dp, pp (`System.rank_order`).  Seconds depend on how many ranks of a group
each node has.
"""

from functools import lru_cache
from math import log2, prod

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rematbench.inputs.constants import CommonConstants
from rematbench.inputs.layout import Layout
from rematbench.inputs.shapes import reached_share


class GroupShape(Struct, frozen=True):
    """The placement of the worst-placed group of a kind: its number of ranks, the smallest number
    of its ranks on one of its nodes, and its number of nodes."""

    ranks: int
    fewest_per_node: int
    nodes: int


def degrees(layout: Layout) -> dict[str, int]:
    """Ranks per axis. Axis `cp` also contains the Ulysses ranks, as neighbours, and axis `tp` those
    that split the columns of matrices."""
    inner, both = layout.cp * layout.ulysses, layout.tp * layout.tp_columns
    return {"tp": both, "cp": inner, "dp": layout.dp // layout.ulysses, "pp": layout.pp}


def group_stride(layout: Layout, group: str, order: tuple[str, ...]) -> int:
    """The distance in ranks between neighbours of a group: the product of degrees before it in
    `order`."""
    sizes = degrees(layout)
    return prod(sizes[name] for name in order[: order.index(group)])


def group_ranks(
    layout: Layout, group: str, stage: int, order: tuple[str, ...]
) -> list[tuple[int, ...]]:
    """All groups of a kind at a pipeline stage, as global rank numbers.

    With Ulysses inside context parallelism, neighbours on the axis `cp` form the `ulysses` groups,
    and ranks at the same position in them form the `cp` groups. The same holds for `columns` and
    `tp`. Data- and context-parallel peers are cut into `state` groups of neighbours, over which
    ZeRO shards states (`Layout.state_shards`); ranks at the same position in them form `replica`
    groups. Experts use the same ranks of a stage: neighbours form `etp` groups, ranks at the same
    position in neighbouring `etp` groups form `ep` groups, and all ranks at the same position in
    `ep` groups are peers (Megatron-core's parallel_state.py, expert_decoder_rank_generator). These
    peers are cut into `edp` groups (`Layout.expert_shards`) and `expert_replica` groups.
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
    grid = np.arange(int(np.prod(shape))).reshape(shape[::-1])  # the slowest axis comes first
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
    """The groups of `shards` neighbours in each row, or (`replicas`) the groups of ranks at the
    same position in them."""
    cut = rows.reshape(len(rows), -1, shards)
    if replicas:
        cut = cut.transpose(0, 2, 1)
    return cut.reshape(-1, cut.shape[2])


EXPERT_AXES = ("edp", "ep", "etp")
"""The kinds of groups of experts, from distant ranks to neighbours."""


def _expert_ranks(
    layout: Layout, group: str, stage: int, order: tuple[str, ...]
) -> NDArray[np.int64]:
    """`group_ranks` of the groups of experts, as an array: groups by ranks."""
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
    """The worst-placed group: the one with the fewest ranks on some node, among the groups on
    several nodes if there are any."""
    nodes = _ranks(layout, group, stage, order) // gpus_per_node
    numbers = np.arange(len(nodes))[:, None] * (nodes.max() + 1) + nodes  # unique per (group, node)
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
    """Whether any pair of pipeline peers of two stages is on different nodes."""
    groups = _ranks(layout, "pp", 0, order) // gpus_per_node
    return bool(np.any(groups[:, from_stage] != groups[:, to_stage]))


def nvlink_share(fewest_per_node: int, gpus_per_node: int, mesh: float) -> float:
    """The share of a GPU's NVLink that a group can use: 1 behind a switch; in a mesh of pairs only
    the links between the group's members, (ranks - 1) / (GPUs - 1).

    Source: NVIDIA HGX H100 and A100 4-GPU boards: no NVSwitch, 6 (4) links between each pair.
    """
    return max(fewest_per_node - 1, 1) / max(gpus_per_node - 1, 1) if mesh > 0 else 1.0


def ring_bytes_per_s(
    fewest_per_node: int,
    nodes: int,
    nvlink_bytes_per_s: float,
    nic_bytes_per_s: float,
    ring_nics: float,
) -> float:
    """The bytes/s of a ring: those of NVLink inside a node, otherwise those of its ranks' NICs. The
    arguments are reached rates, after efficiencies.

    A ring over several nodes enters and leaves each node once per channel, through the NICs of its
    ranks there: (fewest ranks on a node) x NIC, or fewer NICs if NCCL does not use all
    (`ring_nics`). Source: NCCL's ring channels, one NIC per GPU; `ring_nics`:
    config/calibration.yaml.
    """
    network = min(min(fewest_per_node, ring_nics) * nic_bytes_per_s, nvlink_bytes_per_s)
    return network if nodes > 1 else nvlink_bytes_per_s


def ring_steps_s(
    steps: float, ranks: int, nodes: int, nbytes: float, bytes_per_s: float, common: CommonConstants
) -> float:
    """Seconds of a ring of `steps` hops, each of nbytes / ranks bytes, by the faster of NCCL's
    LL128 and Simple protocols: base + hops inside nodes + hops between nodes + wire time.

    An all-gather or a reduce-scatter of `nbytes` gathered bytes takes ranks - 1 steps, which move
    (ranks - 1) / ranks of the bytes over each link; an all-reduce takes 2 (ranks - 1) steps.

    Source: NCCL 2.18 src/graph/tuning.cc, ncclTopoTuneModel (baseLat, hwLat, LL128 at 92 %);
    Thakur, Rabenseifner and Gropp 2005; the bus rate of nccl-tests.
    """
    if ranks == 1:
        return 0.0
    between = steps * nodes / ranks if nodes > 1 else 0.0
    within = steps - between
    wire = steps * nbytes / ranks / bytes_per_s
    return min(
        base + within * near + between * far + wire / share
        for base, near, far, share in zip(
            common.nccl_base_s,
            common.nccl_nvlink_hop_s,
            common.nccl_network_hop_s,
            common.nccl_bandwidth_share,
            strict=True,
        )
    )


TREE_S = (6.8e-6, 0.6e-6, 5.0e-6)
"""Seconds of NCCL's tree with its low-latency protocol (LL): base, hop inside a node, hop between
nodes (NCCL 2.18 src/graph/tuning.cc, baseLat and hwLat)."""


def tree_s(ranks: int, nodes: int) -> float:
    """Seconds of an all-reduce of a few numbers. They go up and down a tree of nodes, and along a
    chain of the ranks of each node.

    Source: NCCL 2.18 src/graph/tuning.cc, ncclTopoTuneModel; with several nodes LL's hop inside a
    node takes 1.8 times as long.
    """
    base, near, far = TREE_S
    inside = 1.8 * near if nodes > 1 else near
    hops = (ranks / nodes - 1) * inside + log2(nodes) * far
    return base + 2 * hops if ranks > 1 else 0.0


def all_to_all_s(
    nbytes: float,
    ranks: int,
    fewest_per_node: int,
    nodes: int,
    nvlink_bytes_per_s: float,
    nic_bytes_per_s: float,
    common: CommonConstants,
    copies: int = 0,
) -> float:
    """Seconds of an all-to-all in which each rank sends `nbytes`. Bytes for ranks of its node go
    over NVLink, and at the same time all other bytes go over the rank's NIC.

    With `copies` > 0 a token has this many experts, and the bytes are one copy of the token for
    each rank that has some of them; a node receives one copy and forwards it over NVLink. Source:
    NCCL's grouped send/receive (one NIC per GPU).
    """
    if ranks == 1:
        return 0.0
    inside = (fewest_per_node - 1) / (fewest_per_node if copies else ranks)
    wire = nbytes * inside / nvlink_bytes_per_s
    if nodes > 1:
        sent = sent_share(ranks, fewest_per_node, nodes, copies)
        wire = max(wire, nbytes * sent / nic_bytes_per_s)
    hop_s = common.nccl_network_hop_s if nodes > 1 else common.nccl_nvlink_hop_s
    return wire + (common.nccl_base_s[-1] + hop_s[-1])


def sent_share(ranks: int, fewest_per_node: int, nodes: int, copies: int) -> float:
    """The share of an all-to-all's bytes that leave a node. With `copies` > 0, the bytes are one
    copy of a token for each rank with some of its experts, but only one copy is sent to each other
    node with such a rank.

    Source: DeepEP (deepseek-ai/DeepEP, README: forwarding from network to NVLink).
    """
    if not copies:
        return (ranks - fewest_per_node) / ranks
    reached = reached_share(nodes, copies) / reached_share(ranks, copies)
    return (nodes - 1) / nodes * reached


def ring_exchange_s(
    nbytes: float,
    ranks: int,
    nodes: int,
    nvlink_bytes_per_s: float,
    nic_bytes_per_s: float,
    common: CommonConstants,
) -> float:
    """Seconds of ring attention's KV exchange: ranks - 1 sends of nbytes / ranks to the neighbour,
    at the rate of the slowest link, which is one rank's NIC if the ring leaves a node.

    Source: Liu et al. 2023 (arXiv 2310.01889).  The sends are point-to-point, so the NICs of the
    node's other ranks cannot help.
    """
    nic = min(nic_bytes_per_s, nvlink_bytes_per_s)
    send_s = point_to_point_s(nbytes / ranks, nodes > 1, nvlink_bytes_per_s, nic, common)
    return (ranks - 1) * send_s


def point_to_point_s(
    nbytes: float,
    crosses_nodes: bool,
    nvlink_bytes_per_s: float,
    nic_bytes_per_s: float,
    common: CommonConstants,
) -> float:
    """Seconds of a send and its receive: base + hop + bytes / link rate (one NIC between nodes)."""
    hop_s = common.nccl_network_hop_s if crosses_nodes else common.nccl_nvlink_hop_s
    rate = nic_bytes_per_s if crosses_nodes else nvlink_bytes_per_s
    return common.nccl_base_s[-1] + hop_s[-1] + nbytes / rate


def network_bytes(
    kind: str, nbytes: float, shape: GroupShape, ring_nics: float, copies: int = 0
) -> float:
    """Bytes that the busiest GPU sends (and receives) over its NIC in a collective between nodes.
    In a ring, `ring_nics` NICs of a node share the bytes; `copies`: see `all_to_all_s`."""
    ranks = shape.ranks
    match kind:
        case "all_gather" | "reduce_scatter":
            return nbytes * (ranks - 1) / ranks / ring_nics
        case "all_reduce":
            return 2.0 * nbytes * (ranks - 1) / ranks / ring_nics
        case "all_to_all":
            return nbytes * sent_share(ranks, shape.fewest_per_node, shape.nodes, copies)
    return nbytes * (ranks - 1) / ranks
