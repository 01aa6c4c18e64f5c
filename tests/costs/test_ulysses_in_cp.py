"""Ulysses inside context parallelism: groups, bytes, FLOPs and seconds by closed formula."""

from math import fsum
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.costs.collectives import group_ranks
from rematbench.costs.operators.kernels import Attention
from rematbench.costs.operators.ops import Comm
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import evaluate, kernel_flop
from rematbench.evaluate.proof import check
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.problem import Problem
from rematbench.worlds.records.refusals import refusals
from tests.problems import LLAMA, on, problem, remade

ORDER = ("tp", "cp", "dp", "pp")
MODEL = replace(LLAMA, num_layers=2, num_kv_heads=LLAMA.num_heads)


def nested(cp: int, ulysses: int, kind: str = "ring", **changes: Any) -> Problem:
    facts = {"cp_kind": kind, "features": ("ulysses", "ulysses_in_cp")}
    asked = {"model": MODEL, "dp": ulysses, "global_batch": 1, "seq_len": 64} | changes
    return problem(system="megatron-bridge", cp=cp, ulysses=ulysses, system_changes=facts, **asked)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("cp", "ulysses"), [(2, 2), (4, 2), (2, 4)])
def test_the_ranks_of_an_exchange_are_neighbours_inside_context_parallelism(
    tp: int, cp: int, ulysses: int
) -> None:
    layout = Layout(tp=tp, cp=cp, dp=2 * ulysses, ulysses=ulysses, global_batch=2)
    found = {name: group_ranks(layout, name, 0, ORDER) for name in ("ulysses", "cp")}
    for name, size, stride in (("ulysses", ulysses, tp), ("cp", cp, tp * ulysses)):
        assert sorted(rank for group in found[name] for rank in group) == [*range(layout.gpus)]
        for group in found[name]:
            assert [*group] == [*range(group[0], group[0] + size * stride, stride)]


@pytest.mark.parametrize("kind", ["ring", "allgather"])
@pytest.mark.parametrize(("cp", "ulysses"), [(2, 2), (4, 1), (1, 4)])
def test_a_rank_computes_the_same_attention_however_its_ranks_are_split(
    kind: str, cp: int, ulysses: int
) -> None:
    """Heads over the one, rows over the other: together a fourth of the FLOPs, tokens, saved q."""
    alone, table = problem(model=MODEL, seq_len=64).layer(0), nested(cp, ulysses, kind).layer(0)
    kernels = [k for k in table.op("attention").forward if isinstance(k, Attention)]
    whole = fsum(map(kernel_flop, alone.op("attention").forward))
    assert fsum(map(kernel_flop, kernels)) == pytest.approx(whole / 4)
    assert [(k.q_rows, k.heads) for k in kernels] == [(64 // cp, MODEL.num_heads // ulysses)]
    for name in ("q", "k", "v", "attn_out", "lse"):
        assert table.activations[name].nbytes * 4 == alone.activations[name].nbytes


@pytest.mark.parametrize("kind", ["ring", "allgather"])
def test_both_exchanges_move_their_shares(kind: str) -> None:
    """The all-to-all moves q, k, v and the output of the rank's tokens; context parallelism the
    keys and values of a half of the heads."""
    made = nested(2, 2, kind)
    program = lower(made.base_plan, made)
    check(program)
    comms = {
        a.exchange.comm
        for a, _, _ in program.ranks[0].actions()
        if a.exchange.comm and a.stream == "cp"
    }
    width, element = MODEL.num_heads * MODEL.head_dim, made.workload.element_bytes
    tokens = 64 // 4
    moved = {Comm("all_to_all", "ulysses", n * tokens * width * element) for n in (1, 3)}
    kv = 2 * 64 * (width // 2) * element  # of the whole sequence
    back = Comm("ring", "cp", 2 * kv) if kind == "ring" else Comm("reduce_scatter", "cp", kv)
    forward = Comm("ring" if kind == "ring" else "all_gather", "cp", kv)
    assert comms == moved | {forward, back}


def test_the_exchange_stays_in_a_node_and_the_ring_leaves_it() -> None:
    model = replace(MODEL, num_heads=8, num_kv_heads=8)
    made = on(nested(2, 8, model=model, seq_len=256), gpus_per_node=8)
    shapes = {name: made.cost.group(name, 0) for name in ("ulysses", "cp")}
    assert (shapes["ulysses"].ranks, shapes["ulysses"].nodes) == (8, 1)
    assert (shapes["cp"].ranks, shapes["cp"].nodes) == (2, 2)
    assert evaluate(made, made.base_plan).step_s > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ulysses": 4, "model": replace(MODEL, num_kv_heads=2)}, "2 KV heads per rank must be"),
        ({"seq_len": 36}, "seq_len 36 must be a multiple of 8: each of cp x ulysses = 4"),
        ({"model": replace(MODEL, attention_window=(16, 0))}, "does not support sliding windows"),
        ({"model": replace(MODEL, position="alibi")}, "does not support ALiBi"),
    ],
)
def test_what_it_cannot_split_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        nested(**{"cp": 2, "ulysses": 2} | changes)


def test_packed_documents_are_refused_inside_context_parallelism() -> None:
    made = nested(2, 2)
    with pytest.raises(LayoutError, match="does not support packed documents"):
        remade(made, workload=replace(made.workload, document_len=32))


def test_the_executor_refuses_it_by_name() -> None:
    made = nested(2, 2, "allgather")
    assert "Ulysses inside context parallelism" in refusals(made, made.base_plan)


@pytest.mark.parametrize("kind", ["ring", "allgather"])
@pytest.mark.parametrize("cp", [1, 4])
def test_parts_that_are_merged_in_fp32_are_beside_the_kernel(kind: str, cp: int) -> None:
    """torch's context parallelism: four outputs in a merge; sums of dQ, and of dK and dV thrice."""
    plain, merged = (
        problem(
            model=replace(MODEL, num_kv_heads=MODEL.num_heads // 2), seq_len=64, cp=cp,
            system_changes={"cp_kind": kind, "cp_merges": merges, "wide_query_gradient": False},
        ).layer(0)
        for merges in (False, True)
    )  # fmt: skip
    q, k, v = (merged.activations[name].nbytes for name in ("q", "k", "v"))
    more = [
        getattr(merged.op("attention"), name) - getattr(plain.op("attention"), name)
        for name in ("scratch_forward_bytes", "scratch_backward_bytes")
    ]
    there = cp > 1
    assert more == [there * (8 * q + k + v), there * (4 * q + 6 * (k + v) + k + v)]
