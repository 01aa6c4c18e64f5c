"""The twin law on real bytes: ledger and memory agree after every action, and nothing is lost."""

from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.program.ledger import issue_order, live_bytes, pool_bytes
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.plan import (
    Keep,
    MiniSequence,
    Offload,
    Plan,
    PlanError,
    Recompute,
    Rule,
    Select,
    Split,
    Window,
)
from rematbench.problem import Problem
from tests.engine.twin.interpreter import EARLY, Rank, interpret
from tests.problems import (
    BALANCED,
    BLOCKS,
    FULL,
    GPT,
    LLAMA,
    SKELETAL,
    half,
    layers,
    problem,
    rule,
    transfers,
)
from tests.strategies import grouped
from tests.tables import tables

EXPERTS = replace(LLAMA, **BLOCKS["experts"])
IN_PARTS = ("skeletal", "skeletal by chunk")
"""Cases that rebuild a part of the rows of every tensor, but experts exchange all tokens."""
MODELS = {
    "experts": EXPERTS,
    "gpt": GPT,
    "gpt of 2 layers": replace(GPT, num_layers=2),
    "llama of 2 layers with all KV heads": layers(2, replace(LLAMA, num_kv_heads=LLAMA.num_heads)),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    name: {key: MODELS[value] if key == "model" else value for key, value in facts.items()}
    for name, facts in tables(__file__)["layouts"].items()
}
WINDOW = Window(op="qkv", direction="backward", layer_offset=1)
PIECES = (MiniSequence(("mlp_norm", "fc1", "act", "mul", "fc2"), 3),)
CASES: dict[str, tuple[tuple[Rule, ...], dict[str, Any]]] = {
    "keep_all": ((), {}),
    "balanced": ((BALANCED,), {}),
    "full_recompute": (FULL, {}),
    "offload": ((half(),), {}),
    "balanced+offload in slots": ((BALANCED, half(0.9)), {"reload_slots": 2}),
    "offload by layer": ((rule(Offload(), "q", "attn_out"),), {"granularity": "layer"}),
    "skeletal": (SKELETAL, {"granularity": "layer"}),
    "skeletal by chunk": (SKELETAL, {"release_lag": 2}),
    "three fates": (
        (rule(Split(offload=0.25, recompute=0.5), "attn_norm_out", "fc2_in", "q"),),
        {"granularity": "layer", "prefetch_layers": 2},
    ),
    "window": ((rule(Recompute(scope="layer", window=WINDOW), "attn_norm_out"),), {}),
}


def planned(given: Problem, case: str) -> Plan:
    rules, moves = CASES[case]
    return transfers(given.base_plan.with_rules(*rules), **moves)


def gradients(ranks: list[Rank]) -> list[dict[tuple[str, ...], str]]:
    """What every gradient was computed from, kernel by kernel."""
    return [rank.gradients for rank in ranks]


def held(given: Problem, plan: Plan, like: Plan) -> list[Rank]:
    """The law: the plan is sound, its bytes are the ledger's after every action, and every gradient
    reads the very bytes that it reads under the plan `like`, which keeps everything."""
    program = lower(plan, given)
    check(program)
    ranks = interpret(program)
    for twin, rank, ledger in zip(ranks, program.ranks, issue_order(program), strict=True):
        assert twin.after == list(live_bytes(rank.actions()))
        assert twin.slot_bytes() == pool_bytes(rank)
        assert twin.peak == ledger.device_peak_bytes
        assert max(host for _, host in twin.after) == ledger.host_peak_bytes
    assert gradients(ranks) == gradients(interpret(lower(like, given)))
    return ranks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_memory_equals_the_ledger_after_every_action(layout: str, case: str) -> None:
    given = problem(**LAYOUTS[layout])
    plan = planned(given, case)
    if given.workload.model.experts and case in IN_PARTS:
        with pytest.raises(PlanError, match="needs all rows: recompute all of them or none"):
            lower(plan, given)
        return
    if given.layout.ulysses > 1 and case == "three fates":
        pytest.skip("an exchange of q alone has another digest than that of q, k and v")
    ranks = held(given, plan, given.base_plan)
    assert gradients(ranks) == gradients(interpret(lower(plan, given), EARLY))


def test_weights_from_the_host_are_those_of_the_device() -> None:
    """Kernels read the same bytes whether a gather's shards come from the device or from the host,
    and both keep as many bytes of activations and buffers alive."""
    there = problem(**LAYOUTS["states on the host"])
    here = problem(**{**LAYOUTS["states on the host"], "system_changes": {}})
    plans = planned(there, "full_recompute"), planned(here, "full_recompute")
    ranks = held(there, plans[0], there.base_plan), held(here, plans[1], here.base_plan)
    assert gradients(ranks[0]) == gradients(ranks[1])
    assert [rank.peak for rank in ranks[0]] == [rank.peak for rank in ranks[1]]


@pytest.mark.parametrize("case", CASES)
def test_what_a_plan_promises_happens(case: str) -> None:
    """Thresholds are such that the bytes moved and rebuilt are not zero."""
    given = problem(**LAYOUTS["interleaved"])
    plan = planned(given, case)
    ranks = interpret(lower(plan, given))
    moved = [sum(rank.moved[kind] for rank in ranks) for kind in (Kind.D2H, Kind.RECOMPUTE)]
    promised = [
        any(word in case for word in ("offload", "skeletal", "three")),
        any(word in case for word in ("balanced", "full", "skeletal", "three", "window")),
    ]
    assert [nbytes > 0 for nbytes in moved] == promised
    evaluation = evaluate(given, plan)
    replicas = given.layout.tp * given.layout.cp * given.layout.dp
    assert evaluation.offload_bytes == moved[0] * replicas
    assert (evaluation.recompute_flop > 0) == (
        promised[1] and case not in ("balanced", "balanced+offload in slots", "window")
    )  # norms and activation functions cost no FLOPs that count


@pytest.mark.parametrize("layout", ["one rank", "tp", "1f1b", "zero 3"])
def test_groups_and_pieces(layout: str) -> None:
    given = problem(**LAYOUTS[layout])
    keep = given.base_plan
    pieces = replace(keep, mini_sequences=PIECES)
    held(given, keep.with_rules(*grouped(keep.partition)), keep)
    for plan in (pieces, pieces.with_rules(*FULL)):
        held(given, plan, pieces)


@pytest.mark.parametrize("layout", ["one rank", "tp", "1f1b", "zero 3", "unfused"])
@pytest.mark.parametrize("operators", [PIECES[0].ops, PIECES[0].ops[1:]])
def test_pieces_read_what_their_consumer_rebuilds_whole(
    layout: str, operators: tuple[str, ...]
) -> None:
    """Attention stands before the pieces and cannot run on a share of its rows."""
    given = problem(**LAYOUTS[layout])
    keep = replace(given.base_plan, mini_sequences=(MiniSequence(operators, 3),))
    plan = keep.with_rules(rule(Recompute()), rule(Keep(), "layer_input"))
    held(given, plan, keep)
    again = [action for action, _, _ in lower(plan, given).ranks[0].actions()]
    attention = [a.rows.fraction for a in again if (a.kind, a.op) == (Kind.RECOMPUTE, "attention")]
    assert attention
    assert set(attention) == {1.0}


@pytest.mark.parametrize("granularity", ["chunk", "layer"])
def test_a_saved_output_of_pieces_is_rebuilt_once(granularity: str) -> None:
    """A norm after the MLP saves what the pieces write."""
    given = problem(model=replace(LLAMA, post_norm=True), tp=2, global_batch=2)
    keep = replace(given.base_plan, mini_sequences=PIECES)
    held(given, transfers(keep.with_rules(*FULL), granularity=granularity), keep)


def test_rebuilt_rows_cover_what_their_reader_needs() -> None:
    """A reader that rebuilds more rows than its input dropped gets the whole input."""
    given = problem(tp=2)
    rules = (rule(Split(recompute=0.25), "attn_norm_out"), rule(Split(recompute=0.625), "q"))
    held(given, given.base_plan.with_rules(*rules), given.base_plan)


def test_a_window_waits_for_what_it_rebuilds_from() -> None:
    """Layer copies: the next layer's input is back before its norm is rebuilt beside a gather."""
    given = problem(tp=2)
    plan = given.base_plan.with_rules(
        rule(Recompute(scope="layer", window=WINDOW), "attn_norm_out"),
        rule(Offload(), "layer_input"),
    )
    held(given, transfers(plan, granularity="layer"), given.base_plan)


def test_tied_embeddings_and_select_by_micro_batch() -> None:
    given = problem(model=replace(LLAMA, tied_embeddings=True), pp=2, global_batch=4)
    some = Rule(Select(parts=("layer",), micro_batches=(1, 3)), Offload())
    held(given, given.base_plan.with_rules(some), given.base_plan)
