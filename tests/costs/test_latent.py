"""Latent attention: the bytes that a layer saves, the weights of ranks, FLOPs and seconds.

Saved bytes: one layer of DeepSeek-V3 in Megatron-core 0.16.1, traced on fake tensors on a CPU, with
EP 8 and balanced experts, in bytes per token.
"""

import re
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.costs.flops import attention_flop_per_token, matrix_flop_per_token
from rematbench.costs.kernel_seconds import backward_flop
from rematbench.costs.operators.block import layer_table
from rematbench.costs.operators.kernels import Attention, Gemm
from rematbench.costs.operators.ops import OpTable
from rematbench.costs.tiles import untiled
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.problems import trained_model
from rematbench.evaluate.proof import check
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.layout_rules import check_layout
from rematbench.inputs.load import load_model, load_system
from rematbench.inputs.system import System, with_facts
from rematbench.plan import PlanError
from rematbench.problem import Problem, rank_parameters
from rematbench.solve.recompute_modules import Module, modules_dropped
from rematbench.workload import Experts, Latent, Model, Workload
from tests.problems import LLAMA, layer_of, plan_of, problem, refusal

MEGATRON = load_system("megatron-core")
TOKENS = 4096
SHIPPED = load_model("deepseek-v3")
V3 = replace(SHIPPED, mtp_layers=0, experts=replace(SHIPPED.experts, aux_loss=0.0001))
LITE = replace(V3, name="no-experts", experts=None)


def table(model: Model = V3, **layout: int) -> OpTable:
    return layer_of(Workload(model=model, seq_len=TOKENS), MEGATRON, **layout)


STATISTICS, NORMS = 4 * 4, 4 * 2
"""Reciprocal root mean squares in fp32: of all norms, and of the two that `layernorm` drops."""
TABLES, ANGLES = 4 * 64 * 2, 4 * 64
"""Cosine and sine of each position for q and for k, in place of which the angles stay."""
CHOICE = 8 * 8 + 8 * 256 / TOKENS
"""Indices of the auxiliary loss's choice, and the tokens of each expert (int64)."""
TRACED: dict[tuple[Module, ...], float] = {
    (): 459_832.5,
    ("moe",): 230_544.0,
    ("moe_act",): 427_064.5,
    ("layernorm",): 431_152.5,
    ("mla_up_proj",): 328_504.5,
    ("core_attn",): 459_320.5,
    ("shared_experts",): 447_544.5,
    ("mla_up_proj", "layernorm", "moe_act"): 267_056.5,
    ("mla_up_proj", "layernorm", "moe"): 70_536.0,
}


@pytest.mark.parametrize("modules", TRACED, ids=str)
def test_a_layer_saves_what_megatron_core_saves(modules: tuple[Module, ...]) -> None:
    found = table(ep=8, dp=8)
    dropped = modules_dropped(modules)
    kept = sum(found.activations[name].nbytes for name in found.saved if name not in dropped)
    more = STATISTICS - NORMS * ("layernorm" in modules)
    more += ANGLES if "mla_up_proj" in modules else TABLES
    assert kept / TOKENS + more + CHOICE * ("moe" not in modules) == TRACED[modules]


def test_only_projections_down_are_whole_on_every_rank() -> None:
    one, four = table(LITE), table(LITE, tp=4)
    down = sum(op.parameters for op in four.ops if op.replicated)
    assert down == 7168 * (1536 + 512 + 64)
    norms = 2 * 7168 + 1536 + 512
    assert one.parameters - down - norms == 4 * (four.parameters - down - norms)
    assert one.parameters == LITE.attention_matrix_parameters + norms + 3 * 7168 * 18432
    assert all(four.op(name).gather for name in ("q_up", "kv_up", "k_turn"))
    rows = TOKENS // 4
    kept = {name: four.activations[name] for name in ("q_latent", "k_rope", "k_turned", "k")}
    assert [(t.rows, t.row_bytes) for t in kept.values()] == [
        (rows, 2 * 1536), (rows, 2 * 64), (TOKENS, 2 * 64), (TOKENS, 2 * 32 * 192)
    ]  # fmt: skip


def test_eager_norms_keep_wide_copies_and_no_compressed_columns() -> None:
    """Transformers' way: the norms' input in fp32, and what their weight scales."""
    work = Workload(model=LITE, seq_len=TOKENS)
    stack = load_system("huggingface-flash")
    found = layer_table(work, Layout(), stack, fused_attention=True, window=0)
    assert not {"q_latent", "kv_latent", "k_rope"} & set(found.saved)
    assert {"q_latent_norm_wide", "kv_latent_norm_scaled", "q_latent_norm_out"} <= set(found.saved)


def test_flops_of_unequal_heads() -> None:
    """Forward 2 (d_qk + d_v) a pair, backward 2 (3 d_qk + 2 d_v): 2.6 times for 192 and 128."""
    kernel = next(k for k in table().op("attention").forward if isinstance(k, Attention))
    assert (kernel.head_dim, kernel.values) == (192, 128)
    assert backward_flop(192, 128) == 2.6
    assert backward_flop(128, 128) == 2.5
    work = Workload(model=V3, seq_len=TOKENS)
    assert attention_flop_per_token(work, causal=False) == 61 * 6 * 128 * (192 + 128) * TOKENS
    assert attention_flop_per_token(work, causal=True) == 61 * 3 * 128 * (192 + 128) * TOKENS


def test_a_prediction_layer_is_a_layer_a_join_and_the_head_once_more() -> None:
    more = replace(V3, mtp_layers=1)
    layer = V3.attention_matrix_parameters + 7168 * 256 + 9 * 3 * 7168 * 2048
    found = matrix_flop_per_token(more) - matrix_flop_per_token(V3)
    assert found == 6 * (layer + 2 * 7168 * 7168 + 7168 * 129280)
    assert more.parameters == V3.parameters
    assert more.prediction_parameters == 11_610_067_968


def test_the_longer_heads_take_longer_than_the_shorter_and_less_than_both_longer() -> None:
    def seconds(nope: int, v: int, direction: str) -> float:
        latent = Latent(q_rank=1536, kv_rank=512, nope=nope, rope=64, v=v)
        model = replace(LITE, latent=latent, head_dim=nope + 64, num_layers=1)
        given = problem(model=model, seq_len=TOKENS, system="megatron-core")
        return given.cost.op_s(given.layer(0).op("attention"), direction)  # type: ignore[arg-type]

    for direction in ("forward", "backward_input"):
        short, mixed, long = (
            seconds(nope, v, direction) for nope, v in ((64, 128), (128, 128), (128, 192))
        )
        assert short < mixed < long


def test_widths_that_kernels_round_up_are_said() -> None:
    odd = Latent(q_rank=1500, kv_rank=512, nope=100, rope=64, v=120)
    work = Workload(model=replace(LITE, latent=odd, head_dim=164), seq_len=TOKENS)
    lines = "\n".join(untiled(work, Layout(), MEGATRON, fused_attention=True))
    assert "q_rank 1500 is not a multiple of 64" in lines
    assert "latent v 120 is not a multiple of 32: attention takes as long as with 128" in lines


def test_sparse_attention_has_bytes_and_no_seconds() -> None:
    assert V3.latent is not None
    index = replace(V3.latent, index_heads=64, index_dim=128, index_top=2048)
    given = problem(model=replace(LITE, latent=index, num_layers=1), system="megatron-core")
    assert "time not modelled: sparse attention" in given.untimed
    chosen = given.layer(0)
    assert chosen.op("index").parameters == 1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128
    assert chosen.activations["chosen"].row_bytes == 4 * 32  # tokens of a short sequence
    assert chosen.parameters == given.workload.model.attention_matrix_parameters + sum(
        (2 * 7168, 1536, 512, 2 * 128, 3 * 7168 * 18432)
    )


def test_mla_up_proj_needs_latent_attention() -> None:
    words = refusal(problem(), "selective_recompute", modules=["mla_up_proj"])
    assert words == "selective_recompute: no layer of test-llama has mla_up_proj"


@pytest.mark.parametrize(
    ("stack", "degrees", "words"),
    [
        (
            with_facts(MEGATRON, cp_kind="allgather"),
            *({"cp": 2}, "MLA with cp_comm_type='all_gather'"),
        ),
        (
            load_system("deepspeed"),
            *({"dp": 2, "ulysses": 2}, "does not match the required shape, the keys'"),
        ),
    ],
)
def test_layouts_that_packages_refuse(stack: System, degrees: dict[str, int], words: str) -> None:
    work = Workload(model=LITE, seq_len=TOKENS)
    with pytest.raises(LayoutError, match=re.escape(words)):
        check_layout(Layout(global_batch=2, **degrees), work, stack)
    check_layout(Layout(global_batch=2, cp=2), work, MEGATRON)


# -- the layer that predicts one more token: its parameters, FLOPs, bytes, place and messages ------


EXPERTS = Experts(count=4, active=2, ffn=64, shared_ffn=32, dense_layers=(0,))
ALONE: dict[str, Any] = {"pp": 4, "global_batch": 4, "stages": "Ett|tt|m|L"}
PLACES: list[dict[str, Any]] = [
    {},
    {"pp": 2, "global_batch": 4},
    {"pp": 2, "vpp": 2, "global_batch": 4, "stages": "E|tt|tt|mL"},
    {"pp": 2, "tp": 2, "global_batch": 4},
    {"pp": 2, "dp": 2, "zero_stage": 1, "global_batch": 8},
    ALONE,
]


def made(*, tied: bool = False, experts: bool = False, **layout: Any) -> Problem:
    model = replace(LLAMA, mtp_layers=1, tied_embeddings=tied)
    return problem(model=replace(model, experts=EXPERTS if experts else None), **layout)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("layout", [PLACES[0], PLACES[1], ALONE])
def test_parameters_and_flops_are_the_models(layout: dict[str, Any], experts: bool) -> None:
    """With pipeline ranks the embedding is there twice; each has every product of the model."""
    given = made(experts=experts, **layout)
    model, plan = given.workload.model, given.base_plan
    held = sum(rank_parameters(given, plan, rank) for rank in range(given.layout.pp))
    copies = model.vocab * model.hidden * (given.layout.pp > 1)
    assert held == model.parameters + model.prediction_parameters + copies
    if experts:
        return
    tables = [*(given.layer(layer) for layer in range(model.num_layers + 1)), given.head]
    products = [k for table in tables for op in table.ops for k in op.forward]
    flop = sum(2 * k.m * k.n * k.k for k in products if isinstance(k, Gemm))
    tokens = given.workload.seq_len * given.layout.micro_batch
    assert 3 * flop == matrix_flop_per_token(model) * tokens


def test_saved_bytes_in_closed_form() -> None:
    """Beside a layer: the input of each of four norms (2h), the joined columns (4h); the two logits
    of the head read columns that lie side by side (4h)."""
    given = made()
    table, layer = given.layer(4), given.layer(0)
    tokens, hidden = given.workload.seq_len * given.layout.micro_batch, LLAMA.hidden
    unit = 2 * tokens * hidden
    both = set(table.saved) & set(layer.saved) - {"layer_input"}
    own = sum(table.activations[name].nbytes for name in table.saved if name not in both)
    statistics = sum(
        tensor.nbytes for name, tensor in table.activations.items() if name.endswith("_root")
    )
    kept = {name for name in table.saved if name not in both}
    assert {"layer_input", "final_norm_out", "next_embedding", "joined", "join_out"} <= kept
    assert own - statistics == 5 * unit + 2 * unit
    assert given.head.activations["layer_output"].nbytes == 2 * unit
    assert "layer_output" in given.head.saved


@pytest.mark.parametrize("layout", PLACES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("text", ["keep_all", "full_recompute:layers=1,4", "full_recompute"])
def test_its_order_is_safe_on_every_stage(layout: dict[str, Any], tied: bool, text: str) -> None:
    if tied and layout is ALONE:
        with pytest.raises(LayoutError, match="between the ranks that hold tied embeddings"):
            made(tied=tied, **layout)
        return
    given = made(tied=tied, **layout)
    plan = plan_of(given, text)
    program = lower(plan, given)
    assert check(program).actions
    whole = simulate(program, action_seconds(given, program))
    assert whole.step_s == pytest.approx(evaluate(given, plan).step_s, rel=1e-9)


def test_messages_and_gradients_go_to_the_stages_that_have_it() -> None:
    """Behind the prediction's stage a message has both predictions; that stage and the first
    exchange the embedding's gradient."""
    given = made(**ALONE)
    program = lower(given.base_plan, given)
    narrow = given.layer(0).activations["layer_input"].nbytes
    sent: list[dict[str, int]] = []
    for rank in program.ranks:
        actions = (action for action, _, _ in rank.actions() if action.kind is Kind.SEND)
        sent.append({action.op: action.nbytes for action in actions})
    assert [one.get("f", 0) // narrow for one in sent] == [1, 1, 2, 0]
    assert [one.get("b", 0) // narrow for one in sent] == [0, 1, 1, 2]
    assert ["tied" in one for one in sent] == [True, False, True, False]
    assert given.embedding_ranks == program.embedding == (0, 2)


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(LayoutError, match="first of several pipeline ranks"):
        made(pp=2, vpp=2, global_batch=4, stages="Ett|t|tm|L")
    with pytest.raises(LayoutError, match="more than one"):
        problem(model=replace(LLAMA, mtp_layers=2))
    given = made(**ALONE)
    with pytest.raises(PlanError, match="in the chunk that the layout says"):
        lower(replace(given.base_plan, partition=(((0, 1),), ((2, 3),), ((),), ((4,),))), given)


def test_a_stack_without_such_layers_trains_the_others_and_says_so() -> None:
    model = replace(LLAMA, mtp_layers=1)
    found = trained_model(model, load_system("torchtitan"))
    assert found == replace(model, mtp_layers=0, left_out=found.left_out)
    assert "torchtitan does not train them" in found.left_out
    assert trained_model(model, load_system("megatron-core")) is model
