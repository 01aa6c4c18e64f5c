"""Hybrid sharding: shards inside a group of ranks, replicas between groups."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.costs.collectives import group_ranks
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.system import with_facts
from rematbench.problem import Problem, rank_parameters
from rematbench.workload import Experts
from tests.problems import layers, on, problem, remade
from tests.tables import tables

ORDER = ("tp", "cp", "dp", "pp")


def hybrid(degree: int, stage: int = 3, dp: int = 8, **changes: Any) -> Problem:
    features = ("hybrid_sharding",)
    return problem(
        model=layers(3), system="torchtitan", dp=dp, zero_stage=stage, shard_degree=degree,
        global_batch=2 * dp, system_changes={"features": features, **changes},
    )  # fmt: skip


def actions(made: Problem, *kinds: Kind) -> list[Action]:
    found = lower(made.base_plan, made).ranks[0].actions()
    return [action for action, _, _ in found if action.kind in kinds and action.stream == "dp"]


@given(
    tp=st.sampled_from([1, 2]), cp=st.sampled_from([1, 2]), dp=st.sampled_from([4, 6]),
    pp=st.sampled_from([1, 2]), degree=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_shards_are_neighbours_and_replicas_have_one_rank_of_each_group(
    tp: int, cp: int, dp: int, pp: int, degree: int
) -> None:
    if dp * cp % degree:
        return
    layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, shard_degree=degree)
    peers = {frozenset(g) for g in group_ranks(replace(layout, shard_degree=0), "state", 0, ORDER)}
    shards = group_ranks(layout, "state", 0, ORDER)
    replicas = group_ranks(layout, "replica", 0, ORDER)
    assert {len(group) for group in shards} == {degree}
    assert {len(group) for group in replicas} == {dp * cp // degree}
    for group in (*shards, *replicas):
        assert sum(peer.issuperset(group) for peer in peers) == 1
    assert all(len({*one} & {*other}) <= 1 for one in shards for other in replicas)
    spans = [max(group) - min(group) for group in shards]
    assert set(spans) == {(degree - 1) * tp}


def test_without_a_degree_all_peers_share() -> None:
    assert group_ranks(Layout(dp=4), "replica", 0, ORDER) == [(0,), (1,), (2,), (3,)]
    whole, default = hybrid(8), hybrid(0)
    assert evaluate(whole, whole.base_plan).step_s == evaluate(default, default.base_plan).step_s


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_scattered_inside_then_summed_between(stage: int, *, overlap: bool) -> None:
    made = hybrid(4, stage, reduce_overlap=overlap)
    check(lower(made.base_plan, made))
    found = actions(made, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
    scatters, sums = found[::2], found[1::2]
    assert {a.kind for a in scatters} == {Kind.REDUCE_SCATTER}
    assert {a.kind for a in sums} == {Kind.ALL_REDUCE}
    for one, other in zip(scatters, sums, strict=True):
        assert (one.exchange.comm.group, other.exchange.comm.group) == ("dp", "replica")
        assert other.exchange.comm.nbytes == -(-one.exchange.comm.nbytes // 4)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_states_are_shared_by_the_degree_alone(degree: int, stage: int) -> None:
    made = hybrid(degree, stage)
    (rank,) = evaluate(made, made.base_plan).ranks
    count, system = rank_parameters(made, made.base_plan, 0), made.system
    share = -(-count // degree)
    assert rank.optimizer == system.states.optimizer_bytes * share
    assert rank.gradient == system.states.grad_bytes * (share if stage > 1 else count)
    assert rank.parameter == system.states.param_bytes * (share if stage > 1 else count)


@settings(max_examples=10, deadline=None)
@given(reduce_bytes=st.sampled_from([1, 2, 4]))
def test_bytes_between_nodes(reduce_bytes: int) -> None:
    """Full sharding gathers twice and scatters once over the nodes; hybrid sharding, with a node's
    GPUs as its degree, sums each rank's share once: 2 (n - 1) / n of it."""
    made = hybrid(4, reduce_bytes=reduce_bytes)
    made = on(made, gpus_per_node=4)
    comms = [
        a.exchange.comm
        for a in actions(made, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
    ]
    between = sum(made.cost.network_bytes(comm, 0) for comm in comms)
    groups = {comm.group for comm in comms if made.cost.network_bytes(comm, 0)}
    assert groups == {"replica"}
    held = sum(c.nbytes for c in comms if c.group == "replica")
    assert between == pytest.approx(2 * held * (2 - 1) / 2)


@pytest.mark.parametrize(("ep", "tp", "shards"), [(1, 1, 4), (2, 1, 2), (4, 1, 1), (4, 2, 1)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_experts_are_sharded_inside_a_replica(ep: int, tp: int, shards: int, stage: int) -> None:
    """Over the ranks of a replica that hold the same experts; replicas all-reduce the shards."""
    model = replace(layers(3), experts=Experts(count=8, active=2, ffn=64))
    made = problem(
        model=model, system="torchtitan", tp=tp, dp=8, ep=ep, zero_stage=stage, shard_degree=4,
        global_batch=16,
    )  # fmt: skip
    lay, system, table = made.layout, made.system, made.layer(0)
    assert (lay.expert_shards, lay.state_replicas) == (shards, 2)
    found = {name: group_ranks(lay, name, 0, ORDER) for name in ("edp", "expert_replica", "state")}
    assert {len(group) for group in found["edp"]} == {shards}
    assert {len(group) for group in found["expert_replica"]} == {2}
    every = {rank for group in found["state"] for rank in group}
    for group in found["edp"]:  # inside a replica: the first or the second half of the ranks
        assert len({rank // (len(every) // 2) for rank in group}) == 1
    program = lower(made.base_plan, made)
    check(program)
    walk = [action for action, _, _ in program.ranks[0].actions() if action.exchange.comm]
    kinds = {
        (a.kind, a.exchange.comm.group) for a in walk if a.op == "gradients" and a.exchange.comm
    }
    assert ((Kind.REDUCE_SCATTER, "edp") in kinds) == (shards > 1)
    assert (Kind.ALL_REDUCE, "expert_replica") in kinds
    experts = 3 * table.expert_parameters
    rest = rank_parameters(made, made.base_plan, 0) - experts
    held = evaluate(made, made.base_plan).ranks[0]
    assert held.optimizer == system.states.optimizer_bytes * (-(-rest // 4) + -(-experts // shards))


@pytest.mark.parametrize(("layout", "facts", "said"), tables(__file__)["refused"])
def test_degrees_that_cannot_be(layout: dict[str, int], facts: dict[str, Any], said: str) -> None:
    made = hybrid(8)
    with pytest.raises(Exception, match=said.replace("(", r"\(").replace(")", r"\)")):
        remade(made, layout=replace(made.layout, **layout), system=with_facts(made.system, **facts))


def test_experts_are_not_spread_over_replicas() -> None:
    model = replace(layers(3), experts=Experts(count=8, active=2, ffn=64))
    with pytest.raises(LayoutError, match="tp x shard_degree = 4 must be a multiple of etp x ep"):
        problem(model=model, system="torchtitan", dp=8, ep=8, shard_degree=4, global_batch=16)
