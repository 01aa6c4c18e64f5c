"""Experts: parameters and states of a rank, refused layouts, and the bytes that a layer saves.

Saved bytes: one layer of Megatron-core 0.16.1, traced on fake tensors on a CPU, with EP 8 and
balanced experts, in bytes per token.
"""

import math
import re
from statistics import median
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.costs.bind_kernels import Direction
from rematbench.costs.collectives import group_ranks, worst_group
from rematbench.costs.operators.kernels import Elementwise, Gemm
from rematbench.costs.operators.ops import OpTable
from rematbench.costs.states import state_bytes
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.simulate.seconds import ActionCosts
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.problems import make_problem
from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.layout_rules import check_layout
from rematbench.inputs.load import load_model, load_system
from rematbench.inputs.paths import data_dir
from rematbench.inputs.system import with_facts
from rematbench.problem import rank_states
from rematbench.solve.recompute_modules import modules_dropped
from rematbench.workload import Model, Workload
from tests.problems import layer_of, remade

MEGATRON = load_system("megatron-core")
TOKENS = 4096
QWEN = load_model("qwen3-30b-a3b")


def table(model: Model = QWEN, tokens: int = TOKENS, **layout: int) -> OpTable:
    return layer_of(Workload(model=model, seq_len=tokens), MEGATRON, **layout)


def per_token(found: OpTable, *names: str) -> float:
    return sum(found.activations[name].nbytes for name in names) / TOKENS


STATISTICS = 4 * (2 + QWEN.num_heads + QWEN.num_kv_heads)
"""Reciprocal root mean squares in fp32 of the two norms, of each query head and each key head."""
VIEWS = 2 * (QWEN.q_width + QWEN.kv_width)
"""The norm of keys reads a view, which keeps the projection's whole output: of it queries (copied
for their norm) and values (copied for the kernel) are kept once more."""
INDICES = 8 * 8
"""Indices (int64) of the auxiliary loss's own choice: autograd saves them and drops them at once,
because nothing differentiates through the choice."""
COUNTS = 8 * 128 / TOKENS
"""The tokens of each expert (int64), which the auxiliary loss saves."""
TRACED: dict[str, tuple[float, tuple[str, ...]]] = {
    "none": (124_568.25, ()),
    "moe_act": (112_280.25, ("expert_fc2_in",)),
    "core_attn": (124_440.25, ("lse",)),
    "moe": (
        53_528.0,
        (
            *("router_scores", "permutation", "expert_in"),
            *("expert_fc1_out", "expert_probs", "expert_fc2_in"),
        ),
    ),
    "layernorm": (116_368.25, ("attn_norm_out", "mlp_norm_out")),
}


@pytest.mark.parametrize("module", TRACED)
def test_a_layer_saves_what_megatron_core_saves(module: str) -> None:
    traced, dropped = TRACED[module]
    found = table(ep=8, dp=8)
    assert set(dropped) <= set(found.saved)
    kept = [name for name in found.saved if name not in dropped]
    more: float = STATISTICS + VIEWS
    more += 0 if module == "moe" else COUNTS + INDICES
    more -= 8 if module == "layernorm" else 0  # the statistics of both norms
    assert per_token(found, *kept) + more == traced


def test_the_output_of_an_activation_without_a_gate_is_saved_for_its_weights() -> None:
    found = table(replace(QWEN, mlp="gelu"), ep=8, dp=8)
    names = ("expert_fc1_out", "expert_act_out", "expert_fc2_in")
    assert set(names) < set(found.saved)
    assert per_token(found, *names) == 3 * 2 * 768 * 8
    assert "expert_act_out" not in table(ep=8, dp=8).saved


@pytest.mark.parametrize("ep", [1, 2, 8, 64])
def test_saved_bytes_do_not_depend_on_expert_parallelism(ep: int) -> None:
    assert table(ep=ep, dp=64).saved_bytes == table(dp=64).saved_bytes


def test_a_shared_expert_and_a_sigmoid_router_with_groups() -> None:
    """The terms of DeepSeek-V3's experts in its traced layer (459,832.5 bytes a token)."""
    experts = replace(load_model("deepseek-v3").experts, aux_loss=0.001)
    found = table(replace(QWEN, hidden=7168, experts=experts), ep=8, dp=8)
    router = per_token(found, "router_scores")
    assert router == 2 * 4 * 256 + 256 + 8 * 8 * 2 + 32 + 64 + 32 + 8
    assert per_token(found, "permutation") == 256 + 4 * 256 + 64
    routed = per_token(found, "expert_in", "expert_fc1_out", "expert_probs", "expert_fc2_in")
    assert routed == 114_688 + 98_336
    shared = ("shared_gate_out", "shared_up_out", "shared_fc2_in")
    assert set(shared) <= set(found.saved)
    assert per_token(found, *shared) == 12_288


def test_tensor_parallel_experts_receive_the_tokens_of_their_group() -> None:
    """Of a local token ETP 2 keeps 2hK + 4K more than ETP 1, at TP 2 (traced: 158,392 and 125,592
    bytes)."""
    one, two = (table(tp=2, dp=8, ep=4, etp=etp) for etp in (1, 2))
    assert (two.saved_bytes - one.saved_bytes) / (TOKENS // 2) == 158_392 - 125_592
    assert one.expert_parameters == 2 * two.expert_parameters
    assert two.op("sort").gather is not None
    assert one.op("sort").gather is None


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, 1), (1, 8, 1), (2, 4, 2), (4, 2, 1)])
def test_ranks_hold_all_weights(tp: int, ep: int, etp: int) -> None:
    found = table(tp=tp, dp=8, ep=ep, etp=etp)
    assert found.expert_parameters * ep * etp == 128 * 3 * 2048 * 768
    split = 2048 * (2 * QWEN.q_width + 2 * QWEN.kv_width) // tp
    rest = 2 * 2048 + 2 * 128 + 128 * 2048
    assert found.parameters - found.expert_parameters == split + rest


def test_states_of_experts_are_sharded_over_expert_data_parallelism() -> None:
    """At EP = DP the states of experts are not sharded at all: 18 bytes a parameter."""
    count = 1_000_000
    whole, part = Layout(dp=8, ep=8), Layout(dp=8, ep=2)
    assert (whole.expert_dp, part.expert_dp) == (1, 4)
    assert state_bytes(count, whole, MEGATRON, whole.expert_dp).total == 18 * count
    assert state_bytes(count, part, MEGATRON, part.expert_dp).total == (6 + 12 / 4) * count
    assert Layout(tp=2, cp=2, dp=8, ep=4, etp=2).expert_dp == 4
    assert Layout(tp=2, dp=8, ep=4).expert_dp == 2  # etp is tp


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dp": 8, "ep": 3}, r"tp x cp x dp = 8 must be a multiple of etp x ep = 1 x 3"),
    ({"dp": 256, "ep": 256}, r"128 experts must be a multiple of ep = 256"),
    ({"tp": 2, "dp": 4, "ep": 8}, r"= 8 must be a multiple of etp x ep = 2 x 8"),
    ({"dp": 512, "etp": 512}, r"ffn 768 of an expert must be a multiple of etp = 512"),
    ({"tp": 2, "dp": 4, "ep": 2, "sp": False}, r"experts with tp = 2 need sequence parallelism"),
]


@pytest.mark.parametrize(("layout", "line"), REFUSED)
def test_layouts_that_megatron_refuses(layout: dict[str, Any], line: str) -> None:
    given = Layout(**layout, global_batch=512)
    work = Workload(model=QWEN, seq_len=TOKENS)
    with pytest.raises(LayoutError, match=line):
        check_layout(given, work, MEGATRON)


def test_expert_parallelism_needs_experts_and_a_stack_with_it() -> None:
    work = Workload(model=replace(QWEN, experts=None), seq_len=TOKENS)
    layout = Layout(dp=8, ep=2, global_batch=8)
    with pytest.raises(LayoutError, match="ep = 2 and etp = 1 need a model with experts"):
        check_layout(layout, work, MEGATRON)
    for more in ({"capacity_factor": 1.0}, {"expert_padding": "capacity"}):
        with pytest.raises(LayoutError, match="capacity_factor and expert_padding need a model"):
            check_layout(Layout(dp=8, global_batch=8), replace(work, **more), MEGATRON)
    with pytest.raises(LayoutError, match="system huggingface has no expert parallelism"):
        check_layout(layout, replace(work, model=QWEN), load_system("huggingface"))


def test_experts_fold_onto_the_ranks_of_a_stage() -> None:
    """Eight ranks a stage: experts split over neighbours, spread over pairs of them, twice."""
    layout = Layout(tp=2, dp=4, pp=2, ep=2, etp=2)
    order = ("tp", "cp", "dp", "pp")
    groups = {kind: group_ranks(layout, kind, 1, order) for kind in ("etp", "ep", "edp")}
    assert groups["etp"] == [(8, 9), (10, 11), (12, 13), (14, 15)]
    assert groups["ep"] == [(8, 10), (9, 11), (12, 14), (13, 15)]
    assert groups["edp"] == [(8, 12), (9, 13), (10, 14), (11, 15)]
    for members in groups.values():
        assert sorted(rank for group in members for rank in group) == list(range(8, 16))


@pytest.mark.parametrize(("etp", "nodes"), [(1, 1), (2, 2), (8, 8)])
def test_experts_leave_a_node_where_their_groups_do(etp: int, nodes: int) -> None:
    layout = Layout(tp=8, dp=8, ep=8, etp=etp)
    shape = worst_group(layout, "ep", 0, 8, ("tp", "cp", "dp", "pp"))
    assert (shape.ranks, shape.nodes) == (8, nodes)


def test_a_step_is_refused_with_parameters_states_and_saved_bytes() -> None:
    with pytest.raises(LayoutError) as error:
        make_problem(Job(**{**STEP, "system": "huggingface", "pp": 1, "ep": 1}))
    line = str(error.value)
    assert "the experts of system huggingface: qwen3-30b-a3b has 30.53 B parameters (3.35" in line
    assert re.search(r"states of a rank [1-9][\d.]* GiB; a layer .* keeps [1-9][\d.]* MiB", line)
    assert "experts balanced" in line


STEP: dict[str, Any] = {
    **{"model": QWEN, "cluster": "h100-80gb", "system": "megatron-core", "gpus": 16},
    **{"seq_len": TOKENS, "global_batch": 16, "pp": 2, "ep": 8},
}


def test_a_step_holds_the_states_of_its_rank() -> None:
    """Experts at EP = DP: 18 bytes; all else: 6 bytes and 12 over DP."""
    found = make_problem(Job(**STEP))
    experts = 24 * 128 * 3 * 2048 * 768 // 8
    rest = 24 * (2048 * 9216 + 2 * 2048 + 256 + 128 * 2048) + 151_936 * 2048 + 2048
    held = [rank_states(found, found.base_plan, rank).total for rank in range(2)]
    assert held[1] == 18 * experts + (6 + 12 // 8) * rest + rest // 2
    ranks = evaluate(found, found.base_plan).ranks
    assert [one.parameter + one.gradient + one.optimizer for one in ranks] == held


def test_the_worst_rank_receives_more_tokens() -> None:
    work = Workload(model=QWEN, seq_len=TOKENS)
    even, worse = (
        layer_of(replace(work, imbalance=factor), MEGATRON, ep=8, dp=8) for factor in (1.0, 1.5)
    )
    for name in ("expert_in", "expert_fc1_out", "expert_fc2_in"):
        assert worse.activations[name].nbytes == 1.5 * even.activations[name].nbytes
    assert worse.activations["permuted"] == even.activations["permuted"]
    sent, received = (each.op("dispatch").reduce for each in (even, worse))
    assert sent is not None
    assert received is not None
    assert received.nbytes == 1.5 * sent.nbytes
    assert replace(work, imbalance=1.5).balance.endswith("1.5 times their balanced share of tokens")
    assert Workload(model=replace(QWEN, experts=None), seq_len=TOKENS, imbalance=2.0).balance == ""


@pytest.mark.parametrize("ep", [1, 8])
def test_padded_experts_receive_their_capacity_and_nobody_counts(ep: int) -> None:
    """ceil(T K / E x factor) rows of each expert from each rank (get_capacity)."""
    work = Workload(model=QWEN, seq_len=TOKENS)
    for factor in (0.5, 1.0, 1.1):
        padded = replace(work, capacity_factor=factor, expert_padding="capacity", imbalance=3.0)
        found = layer_of(padded, MEGATRON, ep=ep, dp=8)
        rows = 128 * math.ceil(TOKENS * 8 / 128 * factor)
        for name in ("permuted", "expert_in", "expert_fc2_in"):
            assert found.activations[name].rows == rows
        assert found.op("expert_counts").reduce is None
        assert padded.balance == f"every expert gets {factor:g} times its balanced share of tokens"
    plain = layer_of(work, MEGATRON, ep=ep, dp=8)
    assert (plain.op("expert_counts").reduce is None) == (ep == 1)


def test_a_capacity_without_padding_is_a_limit() -> None:
    work = Workload(model=QWEN, seq_len=TOKENS, imbalance=1.5)
    rows = TOKENS * 8

    def received(factor: float) -> tuple[int, int]:
        found = layer_of(replace(work, capacity_factor=factor), MEGATRON, ep=8, dp=8)
        assert found.op("expert_counts").reduce is not None
        return found.activations["permuted"].rows, found.activations["expert_in"].rows

    assert received(0.0) == (rows, 1.5 * rows)
    assert received(1.25) == (rows, 1.25 * rows)
    assert received(2.0) == (rows, 1.5 * rows)
    assert received(0.5) == (rows // 2, rows // 2)


def test_a_dispatcher_of_one_copy_sends_tokens_and_not_their_copies() -> None:
    """8 of 128 experts on 8 ranks: 5.25 ranks have some of a token's, on average."""
    one_copy = with_facts(MEGATRON, dispatcher="deepep")
    found = layer_of(Workload(model=QWEN, seq_len=TOKENS), one_copy, ep=8, dp=8)
    ranks = 8 * (1 - (7 / 8) ** 8)
    sent = found.op("dispatch").reduce
    assert sent is not None
    assert sent.nbytes == math.ceil(TOKENS * 8 * ranks / 8) * 2 * 2048
    assert found.op("combine").reduce == sent
    assert "permuted" not in found.activations
    assert found.activations["combined"].rows == TOKENS
    assert found.saved_bytes == table(ep=8, dp=8).saved_bytes
    assert not found.op("unpermute").forward


def test_the_host_paces_the_gemms_of_a_group() -> None:
    cost = make_problem(Job(**STEP)).cost
    pace_s = 8.8e-6
    narrow = cost.kernel_s(Gemm(1, 64, 64, 128), "forward")
    assert 128 * pace_s <= narrow < 130 * pace_s
    assert cost.kernel_s(Gemm(1, 64, 64, 1), "forward") < 2 * pace_s
    wide = cost.kernel_s(Gemm(4096, 8192, 8192, 8), "forward")
    assert wide == pytest.approx(8 * cost.kernel_s(Gemm(4096, 8192, 8192), "forward"), rel=0.1)
    weight = cost.kernel_s(Gemm(4096, 8192, 16, 8), "backward_weight")
    assert weight > 8 * 2 * 4 * 4096 * 8192 / cost.cluster.hbm_bytes_per_s  # fp32, read and written
    op = make_problem(Job(**STEP)).layer(0).op("expert_fc1")
    assert cost.loops_s(op, "forward") == pytest.approx((128 // 8 - 1) * pace_s)
    hook_s = cost.stack.host_launch_s  # of each further expert's gradient
    assert cost.loops_s(op, "backward_weight") == pytest.approx(15 * (pace_s + hook_s))
    assert cost.loops_s(make_problem(Job(**STEP)).layer(0).op("router"), "forward") == 0.0


def test_the_host_issues_experts_at_a_pace_of_their_own() -> None:
    """A launch of experts takes `expert_pace` launches of a dense layer; a balancing loss, torch
    operators in place of a fused kernel, and a dispatcher add launches."""

    def issued_s(op: str, dispatcher: str = "alltoall", **facts: bool) -> float:
        made = make_problem(Job(**STEP))
        made = remade(made, system=with_facts(made.system, dispatcher=dispatcher, **facts))
        blocks = lower(made.base_plan, made).ranks[0].blocks
        action = next(
            action
            for block in blocks
            for action in block.actions
            if (action.op, action.kind) == (op, Kind.FORWARD)
        )
        return ActionCosts(made).issue_s(action, 0) / made.cost.host_launch_s

    pace = make_problem(Job(**STEP)).cost.common.expert_pace
    assert pace > 1.0
    assert issued_s("proj") == 1.0
    assert issued_s("router") == pytest.approx(pace * (1 + 10 + 15))
    assert issued_s("router", fused_router=True) == pytest.approx(pace * (1 + 3 + 8))
    assert issued_s("expert_counts") == pytest.approx(pace * 11)
    assert issued_s("sort", "deepep") == pytest.approx(pace * 19)
    assert issued_s("sort", "deepep", fused_indices=True) == pytest.approx(pace * 7)
    assert issued_s("sort", "hybridep") == pytest.approx(pace)


def test_a_clamp_and_biases_of_experts_are_kernels_of_their_own() -> None:
    """Megatron-core's clamp reads and writes both halves and joins them, its last bias is three
    passes in fp32 and a cast for each expert's rows; the joined halves are saved too."""
    plain = table(replace(QWEN, mlp_bias=False), ep=8, dp=8)
    clamped = table(replace(QWEN, glu_clamp=True), ep=8, dp=8)
    biased = table(replace(QWEN, mlp_bias=True), ep=8, dp=8)
    rows, width, hidden = TOKENS * 8, 2 * 768, QWEN.hidden
    assert clamped.op("expert_act").forward[:-1] == (Elementwise(4 * rows * width * 2, 3),)
    assert clamped.saved_bytes - plain.saved_bytes == rows * width * 2
    *_, added = biased.op("expert_fc2").forward
    assert added == Elementwise(28 * rows * hidden, 2, 16)
    assert biased.op("expert_fc2").backward_input[0] == Elementwise(40 * rows * hidden, 5, 16)
    assert biased.saved_bytes == plain.saved_bytes
    assert "expert_clamped" in modules_dropped(["moe_act"])


def test_half_of_the_published_rates_of_grouped_gemms_are_near() -> None:
    """TransformerEngine's GroupedLinear on B200, as SimuMax measured it: nothing but the pace is
    taken from these rows.  The bounds were written down after the errors were seen."""
    sheet = read_sheet(data_dir("published") / "kernels_moe.csv")
    rows = [row for row in sheet if "SimuMax" in row["source"] and row["unit"] == "TFLOP/s"]
    asked = {**STEP, "cluster": "b200-180gb", "gpus": 16}
    cost = make_problem(Job(**asked)).cost
    errors: dict[str, list[float]] = {}
    for row in rows:
        if "GroupedLinear" not in row["implementation"]:
            continue
        shape = dict(word.split("=") for word in row["shape"].split(";"))
        g, m, n, k = (int(shape[key]) for key in ("groups", "m_per_group", "n", "k"))
        kernels: dict[str, tuple[Gemm, Direction]] = {
            "grouped_gemm_fwd": (Gemm(m, n, k, g), "forward"),
            "grouped_gemm_dgrad": (Gemm(m, k, n, g), "backward_input"),
            "grouped_gemm_wgrad": (Gemm(k, n, m, g), "backward_weight"),
        }
        told_s = 2.0 * g * m * n * k / (float(row["value"]) * 1e12)
        found_s = cost.kernel_s(*kernels[row["what"]])
        errors.setdefault(row["what"], []).append(abs(found_s / told_s - 1.0))
    assert sum(map(len, errors.values())) == 108
    assert median(errors["grouped_gemm_fwd"]) <= 0.12
    assert median(errors["grouped_gemm_dgrad"]) <= 0.12
    assert median(errors["grouped_gemm_wgrad"]) <= 0.25
