"""What each method decides, in closed form: which bytes stay, which are rebuilt, what binds."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.program.ledger import issue_order
from rematbench.evaluate.evaluation import PlanEvaluation, evaluate, kernel_flop
from rematbench.inputs.layout import Layout, partition_of_sizes
from rematbench.plan import Group, Recompute
from rematbench.problem import Problem
from rematbench.solve.kept import kept_activations, kept_layer_bytes
from rematbench.solve.pareto import cheapest_within, front, point
from rematbench.solve.recompute_modules import chosen_layers, layers_text
from rematbench.solve.search import brackets, first_true, smallest_feasible, twice
from rematbench.worlds.records.record import plan_hash
from tests.problems import GPT, all_methods, layers, make_problem, plan_of, problem, refusal
from tests.tables import tables

TABLES = tables(__file__)

REGISTRY = all_methods()
PUBLISHED = ("act_out", "attn_norm_out", "fc2_in", "mlp_norm_out")


def kept(p: Problem, spec: str, **settings: Any) -> set[str]:
    return set(kept_activations(p, plan_of(p, spec, **settings)))


def evaluated(p: Problem, spec: str, **settings: Any) -> PlanEvaluation:
    return evaluate(p, plan_of(p, spec, **settings))


def forward_flop(p: Problem, only: str = "") -> float:
    """FLOPs of all layers' forward over the global batch, on all ranks."""
    lay = p.layout
    names = [op for op in p.layer(0).ops if not only or op.name == only]
    one = sum(kernel_flop(k) for op in names for k in op.forward)
    ranks = lay.tp * lay.cp * lay.dp
    return one * p.workload.model.num_layers * lay.num_micro_batches * ranks


# -- byte formulas of the paper ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "constant", "ffn_factor"), [("keep_all", 12, 8), ("balanced_checkpointing", 8, 4)]
)
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}])
def test_layer_bytes_are_the_papers(
    spec: str, constant: int, ffn_factor: int, layout: dict[str, Any]
) -> None:
    """(12 + 4 g/a + 8 H/h) b s h and (8 + 4 g/a + 4 H/h) b s h, over t c ranks; 2-byte elements."""
    p = problem(model=layers(1), system="megatron-kwai", micro_batch=2, global_batch=2, **layout)
    m = p.workload.model
    unit = 2 * p.workload.seq_len * m.hidden // (p.layout.tp * p.layout.cp)
    factor = constant + 4 * m.num_kv_heads / m.num_heads + ffn_factor * m.ffn / m.hidden
    assert kept_layer_bytes(p, plan_of(p, spec)) == factor * unit


def test_full_recompute_keeps_the_input_alone() -> None:
    p = problem()
    assert kept(p, "full_recompute") == {"layer_input"}
    one_layer = kept_layer_bytes(p, plan_of(p, "full_recompute")) / 4
    assert one_layer == 2 * p.workload.seq_len * p.workload.model.hidden


# -- full recomputation ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"num_layers": 2}, {"num_layers": 3}, {"num_layers": 4}], ids=str
)
def test_uniform_re_runs_every_layer_once(settings: dict[str, int]) -> None:
    p = problem(global_batch=2)
    assert evaluated(p, "full_recompute", **settings).recompute_flop == forward_flop(p)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_block_re_runs_the_first_layers_of_each_chunk(count: int) -> None:
    p = problem(model=layers(8), pp=2, global_batch=2)
    again = evaluated(p, "full_recompute", method="block", num_layers=count).recompute_flop
    assert again == forward_flop(p) * count / 4


def test_every_second_layer() -> None:
    p = problem(model=layers(5))
    plan = plan_of(p, "full_recompute", every=2)
    assert plan.rules[0].select.layers == (1, 3)
    assert evaluate(p, plan).recompute_flop == forward_flop(p) * 2 / 5


def test_groups_stay_inside_chunks() -> None:
    p = problem(model=layers(6), pp=2)
    rules = plan_of(p, "full_recompute", num_layers=2).rules
    fates = [rule.fate for rule in rules]
    scopes = {f.scope for f in fates if isinstance(f, Recompute)}
    assert scopes == {Group(0, 1), "layer", Group(3, 4)}


def test_longer_groups_keep_fewer_inputs() -> None:
    p = problem(model=layers(8))
    kept_bytes = [
        kept_layer_bytes(p, plan_of(p, "full_recompute", num_layers=n)) for n in (1, 2, 4)
    ]
    assert kept_bytes == [8 * kept_bytes[2] // 2, 4 * kept_bytes[2] // 2, kept_bytes[2]]


@pytest.mark.parametrize("every", [1, 2])
def test_inputs_of_groups_leave_and_come_back(every: int) -> None:
    """The host holds each group's input once, and the device that much less, but for the layers
    whose copies are under way."""
    p = problem(model=layers(8), system="rematbench")
    stay = evaluated(p, "full_recompute", num_layers=every)
    leave = evaluated(p, "full_recompute", num_layers=every, inputs="host")
    one = p.layer(0).activations["layer_input"].nbytes
    assert leave.peak_host_bytes[0] - stay.peak_host_bytes[0] == 8 // every * one
    assert leave.recompute_flop == stay.recompute_flop
    assert 0 < stay.peak_device_bytes[0] - leave.peak_device_bytes[0] <= 8 // every * one


def test_inputs_on_the_host_are_refused_by_name() -> None:
    assert refusal(problem(system="megatron-lm"), "full_recompute", inputs="host") == (
        "full_recompute: system megatron-lm has no activation offload"
    )
    block = {"method": "block", "inputs": "host"}
    assert "method=uniform" in refusal(problem(system="rematbench"), "full_recompute", **block)
    both = refusal(problem(system="rematbench"), "memo+full_recompute", inputs="host")
    assert "already sets how tensors are copied" in both


# -- selective recomputation -----------------------------------------------------------------


def test_selective_drops_the_scores_of_unfused_attention() -> None:
    p = problem(model=GPT, attention="unfused")
    dropped = kept(p, "keep_all") - kept(p, "selective_recompute")
    assert dropped == {"attn_probs", "attn_probs_mask", "attn_probs_dropped"}
    assert evaluated(p, "selective_recompute").recompute_flop == forward_flop(p, "attention")


def test_selective_says_that_flash_leaves_it_nothing() -> None:
    p = problem()
    plan = plan_of(p, "selective_recompute")
    assert plan.rules == p.base_plan.rules
    assert "no-op: flash attention" in str(plan.fit["selective_recompute"])


def test_selective_by_operator_and_by_exception() -> None:
    p = problem()
    assert kept(p, "keep_all") - kept(p, "selective_recompute", ops=("fc1",)) == {
        "gate_out",
        "up_out",
    }
    assert kept(p, "selective_recompute", keep=("q", "v")) == {"layer_input", "q", "v"}


def test_selective_refuses_unknown_names() -> None:
    assert "'querry'" in refusal(problem(), "selective_recompute", activations=("querry",))
    assert "'conv'" in refusal(problem(), "selective_recompute", ops=("conv",))


# -- balanced checkpointing ------------------------------------------------------------------

MODELS = ["llama-7b", "llama-65b", "llama-175b"]


def real(model: str, cluster: str = "h800-80gb", seq_len: int = 4096, **layout: Any) -> Problem:
    made = Layout(**layout)
    return make_problem(
        model=model, cluster=cluster, system="megatron-kwai", layout=made, seq_len=seq_len
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("cluster", ["h800-80gb", "a800-80gb"])
def test_the_published_point_is_on_the_front(model: str, tp: int, cluster: str) -> None:
    p = real(model, cluster, tp=tp, pp=8, global_batch=8)
    table = p.layer(0)
    points = front(p, table)
    published = point(p, table, tuple(n for n in table.saved if n in PUBLISHED))
    assert published in points
    assert published.recompute_s < 0.1 * points[-1].recompute_s


def test_the_ladder_trades_bytes_for_seconds() -> None:
    """none < published < published+fc1 < full."""
    p = replace(real("llama-7b", pp=4, vpp=2, global_batch=8), evaluator=evaluate)
    ladder = ("none", "published", "published+fc1", "full")
    runs = [evaluated(p, "balanced_checkpointing", point=rung) for rung in ladder]
    peaks = [max(run.peak_device_bytes) for run in runs]
    seconds = [run.step_s for run in runs]
    assert peaks == sorted(peaks, reverse=True)
    assert seconds == sorted(seconds)
    assert len(set(peaks)) == len(set(seconds)) == 4


def test_a_budget_picks_the_fastest_point_within_it() -> None:
    p = real("llama-65b", tp=2, pp=8, global_batch=8)
    table = p.layer(0)
    plan = plan_of(p, "balanced_checkpointing", point="front", keep_fraction=0.61)
    best = cheapest_within(front(p, table), 0.61 * table.saved_bytes)
    assert set(best.dropped) == set(PUBLISHED)
    assert plan.fit["dropped"] == ", ".join(PUBLISHED)


# -- composition and searches ----------------------------------------------------------------


def test_a_later_method_changes_nothing_its_base_decided() -> None:
    p = problem()
    both = plan_of(p, "balanced_checkpointing+full_recompute")
    assert kept_activations(p, both) == {"layer_input"}
    other = plan_of(p, "full_recompute+balanced_checkpointing")
    assert other.rules == plan_of(p, "full_recompute").rules
    assert "no-op" in str(other.fit["balanced_checkpointing"])


@pytest.mark.parametrize("root", [0, 1, 2, 7, 499, 999, 1000])
@pytest.mark.parametrize("power", [1, 3])
def test_smallest_feasible_finds_the_root(root: int, power: int) -> None:
    calls: list[int] = []

    def margin(k: int) -> int:
        calls.append(k)
        return int((k - root) ** power)

    assert smallest_feasible(margin, 1000) == root
    assert len(calls) <= (9 if power == 1 else 22)


def test_smallest_feasible_may_fail() -> None:
    assert smallest_feasible(lambda k: k - 11, 10) is None


@pytest.mark.parametrize("root", [1, 2, 3, 499, 1000])
def test_brackets_are_doubled_then_halved_around_the_root(root: int) -> None:
    """One bracket after each call, each around the root; doubled and halved, 2 log2 calls."""
    calls: list[int] = []

    def holds(k: int) -> bool:
        calls.append(k)
        return k >= root

    assert first_true(holds, 0, 1000) == root
    assert len(calls) <= 10
    calls.clear()
    found = []
    for low, high in brackets(holds, 0, 1, further=twice):
        found.append((low, high))
        assert len(calls) == len(found)
        assert low < root
    assert found[-1] == (root - 1, root)
    assert len(calls) <= 2 * root.bit_length() + 1


def test_brackets_end_at_the_most_and_where_nothing_is_between() -> None:
    """Doubling ends at the first value from `most` on; no further value is asked."""
    assert [*brackets(lambda _: False, 0, 3, further=twice, most=10)] == [(3, 6), (6, 12), (12, 24)]
    assert [*brackets(lambda _: True, 4, 5)] == []
    assert [*brackets(lambda _: True, 0, 8, between=lambda a, b: 2 if b > 2 else None)] == [(0, 2)]


def test_held_outputs_live_until_their_layers_backward() -> None:
    """PyTorch's selective checkpointing caches outputs that nothing reads: one per layer."""
    p = problem(system="torchtitan")
    plans = [
        plan_of(p, "selective_recompute", keep=("q",), scope="layer", held=names)
        for names in ((), ("fc2_out",))
    ]
    plain, held = (issue_order(lower(plan, p))[0].device_peak_bytes for plan in plans)
    one = p.layer(0).activations["fc2_out"].nbytes
    assert 0 < held - plain <= 4 * one
    assert "fc2_out" not in p.layer(0).saved


def test_fsdps_root_group_stays_gathered_through_the_step() -> None:
    """Embedding and head are gathered once per micro-batch, layers twice (forward and backward)."""
    p = problem(dp=4, zero_stage=3, global_batch=4, system="torchtitan")
    (rank,) = lower(p.base_plan, p).ranks
    gathers = Counter(
        action.part
        for step in rank.steps
        for action in rank.blocks[step.block].actions
        if action.kind is Kind.ALL_GATHER and action.op == "parameters"
    )
    assert gathers == {"E": 1, "H": 1, "L0": 2, "L1": 2, "L2": 2, "L3": 2}


@pytest.mark.parametrize(("fused", "share"), [(True, 1.0), (False, 2 / (4 + 2 + 2))])
def test_separate_linears_re_run_only_what_is_missing(fused: bool, share: float) -> None:
    """Dropping k alone: the fused projection runs whole, a separate one its own columns (4 query
    heads, 2 key and 2 value heads)."""
    p = problem(system_changes={"fused_linears": fused})
    again = evaluated(p, "selective_recompute", activations=("k",)).recompute_flop
    assert again == pytest.approx(forward_flop(p, "qkv") * share, rel=1e-12)


# -- recomputation of chosen layers: lists, numbers by chunk, Megatron's forms as special cases ----


PIPE = problem(model=GPT, pp=2, vpp=2, global_batch=4, stages="E|tt|tt|L")


def hashed(text: str) -> str:
    return plan_hash(PIPE, plan_of(PIPE, text))


@pytest.mark.parametrize(("text", "equal"), TABLES["lists"])
def test_forms_are_lists(text: str, equal: str) -> None:
    assert hashed(text) == hashed(equal)


def test_other_layers_are_kept() -> None:
    some = hashed("selective_recompute:modules=[mlp],layers=1,2")
    assert len({some, hashed("keep_all"), hashed("selective_recompute:modules=[mlp]")}) == 3


@given(st.sets(st.integers(0, 40), min_size=1))
def test_a_printed_list_is_read_back(layers: set[int]) -> None:
    base = problem(pp=1).base_plan
    whole = type(base)(partition=partition_of_sizes([41], 1))
    assert chosen_layers(whole, layers_text(layers)) == tuple(sorted(layers))


@pytest.mark.parametrize(("text", "reason"), TABLES["wrong_lists"])
def test_a_wrong_list_has_a_reason(text: str, reason: str) -> None:
    assert reason in refusal(PIPE, f"full_recompute:{text}")
