"""Whole plans in closed form: recomputed FLOPs, copied bytes, states, utilisation, node memory."""

from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.costs.flops import model_flop_per_token
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import dummy_gradient_bytes, evaluate, program_bytes
from rematbench.evaluate.evaluator import weigh
from rematbench.inputs.load import load_system
from rematbench.inputs.shapes import causal_pairs
from rematbench.inputs.system import with_facts
from rematbench.plan import Offload, Recompute, Rule, StateFate
from rematbench.problem import Problem, Weight
from rematbench.workload import Experts, Model
from tests.problems import (
    BALANCED,
    FULL,
    GPT,
    LLAMA,
    SCORES,
    half,
    layers,
    on,
    problem,
    remade,
    rule,
    transfers,
)

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2, "cp": 2, "pp": 2, "vpp": 2, "dp": 2, "global_batch": 8},
    {"dp": 2, "zero_stage": 3, "global_batch": 6},
    {"pp": 4, "micro_batch": 2, "global_batch": 8},
]


def layer_forward_flop(given: Problem, model: Model = LLAMA) -> int:
    """2 FLOPs a weight and token, 4 a (query, key) pair and query column, over a step."""
    s, sequences = given.workload.seq_len, given.layout.global_batch
    gemms = 2 * s * model.active_layer_matrices // model.num_layers
    attention = 4 * causal_pairs(s, 0) * model.q_width
    return sequences * (gemms + attention)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_recompute_is_one_more_forward_of_its_layers(layout: dict[str, Any]) -> None:
    given = problem(**layout)
    for chosen in ((0, 1, 2, 3), (1, 2)):
        some = [Rule(replace(r.select, layers=chosen), r.fate) for r in FULL]
        evaluation = evaluate(given, given.base_plan.with_rules(*some))
        assert evaluation.recompute_flop == len(chosen) * layer_forward_flop(given)


def test_balanced_recompute_costs_no_flop() -> None:
    given = problem()
    evaluation = evaluate(given, given.base_plan.with_rules(BALANCED))
    assert evaluation.recompute_flop == 0
    assert evaluation.hfu == evaluation.mfu_causal
    assert evaluation.step_s > evaluate(given, given.base_plan).step_s


def test_selective_recompute_is_attention_alone() -> None:
    """Korthikanti's selective recomputation: QK^T and scores x V again, dense: 4 s^2 h a layer."""
    given = problem(model=GPT, system="megatron-lm", attention="unfused", global_batch=3)
    evaluation = evaluate(given, given.base_plan.with_rules(rule(Recompute(), *SCORES)))
    assert evaluation.recompute_flop == 3 * GPT.num_layers * 4 * 32 * 32 * GPT.hidden


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offload_bytes_are_saved_bytes_of_every_micro_batch(layout: dict[str, Any]) -> None:
    given = problem(**layout)
    evaluation = evaluate(given, given.base_plan.with_rules(rule(Offload())))
    lay = given.layout
    chunks = LLAMA.num_layers * lay.num_micro_batches * lay.tp * lay.cp * lay.dp
    assert evaluation.offload_bytes == chunks * given.layer(0).saved_bytes
    assert evaluation.recompute_flop == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rates_follow_from_the_step(layout: dict[str, Any]) -> None:
    given = problem(**layout)
    evaluation = evaluate(given, given.base_plan.with_rules(*FULL))
    tokens = given.layout.global_batch * 32
    rate = tokens / evaluation.step_s / given.layout.gpus
    assert evaluation.tokens_per_s_per_gpu == rate
    peak = given.cluster.peak_flop_per_s
    for measured, causal in ((evaluation.mfu_causal, True), (evaluation.mfu_dense, False)):
        flop = model_flop_per_token(given.workload, causal=causal)
        assert measured == pytest.approx(rate * flop / peak, rel=1e-12)
    again = evaluation.recompute_flop / tokens
    flop = model_flop_per_token(given.workload) + again
    assert evaluation.hfu == pytest.approx(rate * flop / peak, rel=1e-12)


@pytest.mark.parametrize(
    ("stage", "shards"), [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))]
)
def test_zero_shards_the_states(stage: int, shards: tuple[int, int, int]) -> None:
    """bf16 parameters (2 B), fp32 gradients (4 B), fp32 master and moments (12 B) a parameter."""
    given = problem(dp=4, zero_stage=stage, global_batch=4)
    (rank,) = evaluate(given, given.base_plan).ranks
    n = LLAMA.parameters
    assert n % 4 == 0
    assert rank.parameter == 2 * n // shards[0]
    assert rank.gradient == 4 * n // shards[1]
    assert rank.optimizer == 12 * n // shards[2]


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_ranks_hold_every_parameter_once(tied: bool) -> None:
    """But for a tied embedding, of which the last stage holds its own copy."""
    model = replace(LLAMA, tied_embeddings=tied)
    given = problem(model=model, pp=4, zero_stage=0, global_batch=4)
    held = [rank.parameter // 2 for rank in evaluate(given, given.base_plan).ranks]
    assert sum(held) == model.parameters + (model.head_parameters if tied else 0)
    assert held[1] == held[2] == given.layer(1).parameters


def test_the_optimizer_may_live_on_the_host() -> None:
    given = problem()
    plan = replace(given.base_plan, states=(StateFate(kind="optimizer", home="host"),))
    (rank,) = evaluate(given, plan).ranks
    assert (rank.optimizer, rank.host_state) == (0, 12 * LLAMA.parameters)


def test_peaks_add_up() -> None:
    given = problem(pp=2, vpp=2, global_batch=4)
    plan = transfers(given.base_plan.with_rules(half()), reload_slots=2)
    evaluation = evaluate(given, plan)
    for rank, device, host in zip(
        evaluation.ranks, evaluation.peak_device_bytes, evaluation.peak_host_bytes, strict=True
    ):
        states = rank.parameter + rank.gradient + rank.optimizer
        assert device == states + rank.activation_peak + rank.pools
        assert host == rank.host_state + rank.host_activation_peak + rank.host_rounding
        assert rank.pools > 0
        assert rank.host_activation_peak > 0


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_host_memory_is_summed_over_the_ranks_of_a_node(per_node: int) -> None:
    """Ranks are placed tp, cp, dp, pp: 2 a stage, so a node of 4 holds two stages."""
    given = on(problem(pp=2, tp=2, global_batch=4), gpus_per_node=per_node)
    evaluation = evaluate(given, given.base_plan.with_rules(rule(Offload())))
    first, second = evaluation.peak_host_bytes
    expected = {1: max(first, second), 2: 2 * max(first, second), 4: 2 * (first + second)}
    assert evaluation.host_node_bytes == expected[per_node]


def test_a_plan_is_timed_once_and_not_where_it_is_only_weighed() -> None:
    timed, weighed = [], []

    def timing(given: Problem, plan: Any) -> Any:
        timed.append(plan)
        return evaluate(given, plan)

    def weighing(given: Problem, plan: Any) -> Weight:
        weighed.append(plan)
        return weigh(given, plan)

    base = problem(pp=2, global_batch=4, model=layers(2))
    given = remade(base, evaluator=timing, weigher=weighing)
    plan = given.base_plan.with_rules(rule(Offload()))
    found = given.cost.weigh(plan)
    assert found.peak_device_bytes == evaluate(base, plan).peak_device_bytes
    room = given.usable_bytes - given.cost.headroom_bytes(plan)
    assert room == found.reserved_bytes >= given.cost.peak_bytes(plan)
    assert (len(timed), len(weighed)) == (0, 1)
    given.cost.step_s(given.base_plan)
    given.cost.weigh(given.base_plan)  # known from the evaluation
    keep = evaluate(base, base.base_plan)
    assert given.cost.step_s(given.base_plan) == keep.step_s
    assert given.cost.peak_bytes(given.base_plan) == max(keep.peak_device_bytes)
    assert (len(timed), len(weighed)) == (1, 1)
    with pytest.raises(RuntimeError, match="has no evaluator"):
        base.cost.evaluate(plan)


# -- buffers that stand in for gradients -----------------------------------------------------------


MODEL = replace(LLAMA, ffn=112)


def made(*, dummy: bool = True, model: Any = MODEL, **layout: Any) -> Problem:
    given = problem(model=model, **layout)
    system = load_system("megatron-core")
    assert system.states.dummy_gradients
    return remade(given, system=with_facts(system, dummy_gradients=dummy))


def held(given: Problem) -> list[int]:
    plan = given.base_plan
    return [dummy_gradient_bytes(given, plan, rank) for rank in range(given.layout.pp)]


def test_a_rank_holds_a_buffer_for_each_shape_of_its_weights() -> None:
    """q, k and v are a product, and so are gate and up; the last rank has the head's columns."""
    given = made(pp=2, tp=2)
    model, tp = given.workload.model, 2
    h, f = model.hidden, model.ffn
    qkv, kv = (model.q_width + 2 * model.kv_width) // tp, model.q_width // tp
    layer = h * qkv + kv * h + h * (2 * f // tp) + (f // tp) * h
    vocab = given.system.padded_vocab(model.vocab, tp) // tp
    assert held(given) == [2 * layer, 2 * (layer + h * vocab)]
    assert held(made(dummy=False, pp=2, tp=2)) == [0, 0]


def test_experts_share_the_buffer_of_their_shape_and_a_router_has_none() -> None:
    model = replace(MODEL, experts=Experts(count=8, active=2, ffn=96))
    given = made(model=model, dp=2, ep=2, global_batch=2)
    h = model.hidden
    attention = h * (model.q_width + 2 * model.kv_width) + model.q_width * h
    head = h * given.system.padded_vocab(model.vocab, 1)
    assert held(given) == [2 * (attention + h * 2 * 96 + 96 * h + head)]


def test_the_peak_of_a_rank_has_the_buffers() -> None:
    with_them, without = made(pp=2), made(dummy=False, pp=2)
    found, plain = (
        program_bytes(one, one.base_plan, lower(one.base_plan, one)) for one in (with_them, without)
    )
    more = [a.device_peak - b.device_peak for a, b in zip(found, plain, strict=True)]
    assert more == held(with_them)
