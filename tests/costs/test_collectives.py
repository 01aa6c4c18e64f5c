"""Where process groups lie, which links they share, and what a ring then costs."""

from typing import Any, get_args

import pytest
from msgspec.structs import replace

from rematbench.costs import collectives as c
from rematbench.costs.bind import CostModel
from rematbench.costs.operators.ops import Comm, CommKind
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.facts import check_cluster
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_cluster, load_model, load_system
from rematbench.inputs.shapes import reached_share
from rematbench.problem import Problem
from rematbench.workload import Workload
from tests.cost_constants import COMMON, NETWORK, ROUND
from tests.problems import make_problem

ORDER = ("tp", "cp", "dp", "pp")
GB = 10**9


def shape(layout: Layout, group: str, stage: int = 0, per_node: int = 8) -> c.GroupShape:
    return c.worst_group(layout, group, stage, per_node, ORDER)


def test_ranks_are_tp_then_cp_then_dp_then_pp() -> None:
    strides = [c.group_stride(Layout(tp=4, cp=2, dp=3, pp=5), group, ORDER) for group in ORDER]
    assert strides == [1, 4, 8, 24]
    layout = Layout(tp=2, cp=2, dp=2, pp=2)
    assert c.group_ranks(layout, "tp", 0, ORDER)[0] == (0, 1)
    assert (0, 2) in c.group_ranks(layout, "cp", 0, ORDER)
    assert (1, 5) in c.group_ranks(layout, "dp", 0, ORDER)
    assert (8, 12) in c.group_ranks(layout, "dp", 1, ORDER)
    assert (3, 11) in c.group_ranks(layout, "pp", 0, ORDER)
    assert {frozenset(group) for group in c.group_ranks(layout, "state", 0, ORDER)} == {
        frozenset((0, 2, 4, 6)),
        frozenset((1, 3, 5, 7)),
    }


def test_ulysses_ranks_are_neighbours_taken_from_dp() -> None:
    layout = Layout(ulysses=4, dp=8)
    assert c.group_ranks(layout, "cp", 0, ORDER)[0] == (0, 1, 2, 3)
    assert shape(layout, "dp").ranks == 2
    assert shape(layout, "state").ranks == 8


@pytest.mark.parametrize(
    ("layout", "expected"),
    [(Layout(tp=8), c.GroupShape(8, 8, 1)), (Layout(tp=16), c.GroupShape(16, 8, 2))],
)
def test_tensor_groups(layout: Layout, expected: c.GroupShape) -> None:
    assert shape(layout, "tp") == expected


def test_an_uneven_straddle_is_the_worst_group() -> None:
    # 65B on 112 GPUs (ATC'24 figure 9): a stage is 28 ranks = three nodes and a half, so one
    # node holds a single rank of each DP group of seven.
    layout = Layout(tp=4, pp=4, dp=7)
    assert [shape(layout, "state", stage).fewest_per_node for stage in range(4)] == [1, 1, 1, 1]
    assert shape(layout, "state") == c.GroupShape(7, 1, 4)


def test_the_last_node_may_be_filled_in_part() -> None:
    assert shape(Layout(dp=12), "state") == c.GroupShape(12, 4, 2)
    assert shape(Layout(tp=4, pp=3), "tp", 2) == c.GroupShape(4, 4, 1)
    assert not c.crosses_nodes(Layout(tp=4, pp=3), 0, 1, 8, ORDER)
    assert c.crosses_nodes(Layout(tp=4, pp=3), 1, 2, 8, ORDER)


def model(**layout: Any) -> CostModel:
    cluster = replace(
        load_cluster("h800-80gb"), nvlink_bytes_per_s=200e9, nics_per_node=8, nic_bytes_per_s=12.5e9
    )
    work = Workload(model=load_model("llama-65b"), seq_len=4096)
    return CostModel(
        cluster=cluster,
        system=load_system("megatron-kwai"),
        layout=Layout(**layout),
        workload=work,
        calibration=ROUND,
        attention="fa2",
    )


@pytest.mark.parametrize(
    ("layout", "nics"), [({"tp": 8, "dp": 4}, 1), ({"tp": 4, "dp": 4}, 2), ({"tp": 2, "dp": 8}, 4)]
)
def test_a_dp_ring_has_the_nics_of_its_fewest_ranks_on_a_node(
    layout: dict[str, int], nics: int
) -> None:
    size = layout["dp"]
    seconds = model(**layout).comm_s(Comm("reduce_scatter", "dp", GB), 0)
    assert seconds == pytest.approx((size - 1) / size * GB / (nics * 12.5e9 * 0.5))


def test_a_ring_inside_a_node_runs_on_nvlink() -> None:
    seconds = model(tp=4, dp=2).comm_s(Comm("all_gather", "tp", GB), 0)
    assert seconds == pytest.approx(0.75 * GB / 200e9)


def test_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    costs = model(tp=8)
    once = costs.comm_s(Comm("all_gather", "tp", GB), 0)
    assert costs.comm_s(Comm("all_reduce", "tp", GB), 0) == pytest.approx(2 * once)


def test_a_few_numbers_go_up_and_down_a_tree() -> None:
    """Eight ranks of a node are a chain; four nodes of eight are a tree of chains."""
    assert c.tree_s(8, 1) == pytest.approx(6.8e-6 + 2 * 7 * 0.6e-6)
    assert c.tree_s(32, 4) == pytest.approx(6.8e-6 + 2 * (7 * 1.8 * 0.6e-6 + 2 * 5e-6))
    assert model(tp=8).comm_s(Comm("amax", "tp", 4), 0) == c.tree_s(8, 1)


def test_lonely_groups_cost_nothing() -> None:
    costs = model(tp=1, dp=1)
    for kind in get_args(CommKind):
        assert costs.comm_s(Comm(kind, "tp", GB), 0) == 0.0


def test_ring_attention_has_one_nic_between_nodes() -> None:
    inside = model(tp=2, cp=4).comm_s(Comm("ring", "cp", GB), 0)
    outside = model(tp=4, cp=4).comm_s(Comm("ring", "cp", GB), 0)
    assert inside == pytest.approx(0.75 * GB / 200e9)
    assert outside == pytest.approx(0.75 * GB / 6.25e9)


def test_all_to_all_splits_between_nvlink_and_the_own_nic() -> None:
    # 16 ranks on two nodes: half of the payload leaves over the rank's NIC
    seconds = c.all_to_all_s(GB, 16, 8, 2, 200e9, 6.25e9, COMMON)
    assert seconds == pytest.approx(0.5 * GB / 6.25e9)
    assert c.all_to_all_s(GB, 8, 8, 1, 200e9, 6.25e9, COMMON) == pytest.approx(7 / 8 * GB / 200e9)


def test_a_dispatcher_sends_a_rank_and_a_node_one_copy_of_a_token() -> None:
    """Two nodes, 8 copies: nearly every token goes to the other node once, not four times."""
    ranks = 16 * (1 - (15 / 16) ** 8)  # of 8 copies some have one rank
    assert reached_share(16, 8) == pytest.approx(ranks / 8)
    assert reached_share(8, 1) == pytest.approx(1.0)
    share = c.sent_share(16, 8, 2, 8)
    assert share == pytest.approx((1 - 0.5**8) / ranks)
    assert c.sent_share(16, 8, 2, 0) == 0.5
    assert c.sent_share(16, 8, 2, 1) == pytest.approx(0.5)
    assert c.sent_share(8, 8, 1, 8) == 0.0
    far = c.all_to_all_s(GB, 16, 8, 2, 200e9, 6.25e9, COMMON, 8)
    assert far == pytest.approx(GB * share / 6.25e9)
    near = c.all_to_all_s(GB, 16, 8, 2, 200e9, 1e15, COMMON, 8)
    assert near == pytest.approx(7 / 8 * GB / 200e9)  # passed on by the GPU that received it


def test_point_to_point_uses_the_own_nic_between_nodes() -> None:
    costs = model(tp=8, pp=2)
    assert costs.p2p_s(GB, 0, 1) == pytest.approx(GB / 6.25e9)
    assert model(tp=4, pp=2).p2p_s(GB, 0, 1) == pytest.approx(GB / 200e9)


def test_a_mesh_gives_a_pair_its_own_links_only() -> None:
    assert c.nvlink_share(2, 4, 1) == pytest.approx(1 / 3)
    assert c.nvlink_share(4, 4, 1) == 1.0
    assert c.nvlink_share(2, 4, 0) == 1.0


def test_latency_counts_hops_and_the_faster_protocol_wins() -> None:
    two = replace(
        COMMON,
        nccl_base_s=(0.0, 10.0),
        nccl_nvlink_hop_s=(1.0, 1.0),
        nccl_network_hop_s=(5.0, 5.0),
        nccl_bandwidth_share=(0.5, 1.0),
    )
    # 8 ranks on 2 nodes: 7 steps, 7 x 2 / 8 of them between nodes
    hops = 7 * 0.25 * 5.0 + 7 * 0.75 * 1.0
    assert c.ring_steps_s(7, 8, 2, 0.0, 1.0, two) == pytest.approx(hops)
    assert c.ring_steps_s(7, 8, 2, 160.0, 1.0, two) == pytest.approx(hops + 10.0 + 140.0)


def test_a_ring_has_the_nics_of_its_ranks_and_one_rank_sends_nothing() -> None:
    assert c.ring_steps_s(0, 1, 1, 1e9, 1e9, COMMON) == 0.0
    rates = [c.ring_bytes_per_s(n, n, 200e9, 6.25e9, 8) for n in (1, 4)]
    assert rates == [200e9, 25e9]
    assert c.ring_bytes_per_s(4, 2, 200e9, 6.25e9, 2) == 12.5e9


def test_the_network_constants_of_an_unknown_cluster_are_the_default() -> None:
    assert ROUND.network_entry(("somewhere", "else")) == "default"
    assert ROUND.networks["default"] is NETWORK
    with pytest.raises(KeyError, match="no calibration for GPU generation 'pascal'"):
        ROUND.gpu("pascal")


def test_only_collectives_slow_compute() -> None:
    costs = model(tp=8)
    assert [costs.overlap_factor(s) for s in ("tp", "cp", "dp", "h2d", "pp_send")] == [
        1.5,
        1.5,
        1.25,
        1.0,
        1.0,
    ]
    comm = Comm("all_gather", "tp", GB)
    assert costs.overlapped_s(1.0, costs.comm_s(comm, 0), "tp") == pytest.approx(
        1.0 + 0.5 * 0.004375
    )
    assert model(tp=8, dp=2).stall_s(Comm("all_gather", "dp", GB), 0) == pytest.approx(0.25 * 0.08)


def test_replicated_tensors_are_sent_in_parts_and_gathered() -> None:
    costs = model(tp=8, pp=2)
    gathered = costs.comm_s(Comm("all_gather", "tp", GB), 0)
    whole = costs.p2p_s(GB, 0, 1)
    assert costs.p2p_s(GB, 0, 1, replicated=True) == pytest.approx(whole / 8 + gathered)
    assert model(tp=1, pp=2).p2p_s(GB, 0, 1, replicated=True) == model(tp=1, pp=2).p2p_s(GB, 0, 1)


# -- nVLink domains larger than a node: groups and collectives see the domain, hosts the node ------


RACK = load_cluster("gb200-nvl72")


def on_racks(system: str = "nemo-24.12", **layout: int) -> Problem:
    return make_problem(
        layout=Layout(**layout),
        model="llama-3.1-70b",
        cluster="gb200-nvl72",
        system=system,
        seq_len=8192,
    )


@pytest.mark.parametrize(
    ("gpus", "inside"), [(4, 72), (64, 72), (72, 72), (144, 72), (128, 64), (256, 64), (100, 20)]
)
def test_a_job_has_equal_whole_nodes_in_each_domain(gpus: int, inside: int) -> None:
    assert RACK.domain(gpus) == inside
    assert load_cluster("h100-80gb").domain(gpus) == 8


def test_a_group_within_the_domain_uses_nvlink_and_overlaps() -> None:
    given = on_racks(tp=8, dp=2, global_batch=2)
    assert given.cost.group("tp", 0).nodes == 1
    assert given.tp_overlap == "gemm"
    assert given.cost.network_bytes(Comm("all_gather", "tp", 1 << 20), 0) == 0.0
    assert not on_racks(tp=8, pp=8).cost.crosses(0, 7)
    assert on_racks(tp=8, pp=16).cost.crosses(7, 8)


def test_the_host_is_that_of_a_node() -> None:
    rack = on_racks(tp=8, dp=8, global_batch=8)
    node = make_problem(
        layout=rack.layout,
        model="llama-3.1-70b",
        cluster=replace(RACK, nvlink_domain=None),
        system="nemo-24.12",
        seq_len=8192,
    )
    assert rack.cost.copy_bytes_per_s() == node.cost.copy_bytes_per_s()
    assert rack.cost.host_room_bytes == node.cost.host_room_bytes
    assert rack.cost.nic_bytes_per_s == node.cost.nic_bytes_per_s
    gather = Comm("all_gather", "tp", 1 << 24)
    assert rack.cost.comm_s(gather, 0) < node.cost.comm_s(gather, 0)


def test_a_domain_is_made_of_whole_nodes() -> None:
    with pytest.raises(ConfigError, match="nvlink_domain: 70 GPUs are not whole nodes of 4"):
        check_cluster(replace(RACK, nvlink_domain=70), "mine", ("blackwell",))
