"""The layer that predicts one more token: its parameters, FLOPs, bytes, place and messages."""

from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.costs.flops import matrix_flop_per_token
from rematbench.costs.operators.kernels import Gemm
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.problems import trained_model
from rematbench.evaluate.proof import check
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.load import load_system
from rematbench.plan import PlanError
from rematbench.problem import Problem, rank_parameters
from rematbench.workload import Experts
from tests.problems import LLAMA, plan_of, problem

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
        with pytest.raises(LayoutError, match="between tied embeddings on other ranks"):
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
    with pytest.raises(LayoutError, match="first of several ranks"):
        made(pp=2, vpp=2, global_batch=4, stages="Ett|t|tm|L")
    with pytest.raises(LayoutError, match="more than one"):
        problem(model=replace(LLAMA, mtp_layers=2))
    given = made(**ALONE)
    with pytest.raises(PlanError, match="the layout says which chunk"):
        lower(replace(given.base_plan, partition=(((0, 1),), ((2, 3),), ((),), ((4,),))), given)


def test_a_stack_without_such_layers_trains_the_others_and_says_so() -> None:
    model = replace(LLAMA, mtp_layers=1)
    found = trained_model(model, load_system("torchtitan"))
    assert found == replace(model, mtp_layers=0, left_out=found.left_out)
    assert "torchtitan does not train them" in found.left_out
    assert trained_model(model, load_system("megatron-core")) is model
