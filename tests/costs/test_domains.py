"""NVLink domains larger than a node: groups and collectives see the domain, hosts the node."""

import pytest
from msgspec.structs import replace

from rematbench.costs.operators.ops import Comm
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.facts import check_cluster
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_cluster
from rematbench.problem import Problem
from tests.problems import make_problem

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
