"""Experts and latent attention: the ledger's bytes, the autograd model's gradients and keep_all's
numbers, on one process and on grids of tensor, expert and pipeline parallelism; and refusals."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from msgspec import structs

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.evaluate.problems import make_problem
from rematbench.inputs.job import Job
from rematbench.inputs.stages import read_stages
from rematbench.inputs.system import FACTS, with_facts
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.torch import attention_backends as attn
from rematbench.worlds.torch import experts, operators
from rematbench.worlds.torch.case import Case, Result
from rematbench.worlds.torch.groups import coordinates, expert_place
from rematbench.worlds.torch.operands import Call, Tensors
from rematbench.worlds.torch.rank_model import RankModel
from rematbench.worlds.torch.single_rank import trace_rank
from tests.problems import plan_of, problem, remade
from tests.tables import tables
from tests.worlds.torch import cases, grid, laws
from tests.worlds.torch.cases import EXPERTS, LATENT, MIXTURE, SHARED

TABLES = tables(__file__)

assert LATENT.latent is not None
SIGMOID = structs.replace(EXPERTS, router="sigmoid", shared_ffn=48, dense_layers=(0,))
MODELS = {
    "mixture": MIXTURE,
    "shared": SHARED,
    "ungated": structs.replace(MIXTURE, mlp="gelu"),
    "latent": LATENT,
    "whole-queries": structs.replace(LATENT, latent=structs.replace(LATENT.latent, q_rank=0)),
    "both": structs.replace(LATENT, experts=SIGMOID),
    "next": structs.replace(LATENT, mtp_layers=1),
    "prediction": structs.replace(LATENT, experts=SIGMOID, mtp_layers=1),
}
EVERYWHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "keep_all": ("keep_all", {}),
    "full_recompute": ("full_recompute", {}),
    "balanced-all": ("balanced_checkpointing", {"point": "all"}),
    "memo": ("memo", {"alpha": 0.5, "exempt_layers": 1}),
    "mst": ("mst", {"mlp_chunks": 3, "head_chunks": 5}),
    "karma": ("karma", {"resident": 0}),
}
OF_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = EVERYWHERE | {
    "moe": ("selective_recompute", {"modules": ["moe"]}),
    "parts": ("selective_recompute", {"modules": ["moe_act", "shared_experts", "layernorm"]}),
    "balanced": ("balanced_checkpointing", {}),
    "mst+full": ("mst+full_recompute", {"mlp_chunks": 3, "head_chunks": 5}),
    "moe+mst": ("selective_recompute+mst", {"modules": ["moe"], "head_chunks": 5}),
}
OF_LATENT: dict[str, tuple[str, dict[str, Any]]] = EVERYWHERE | {
    "mla_up_proj": ("selective_recompute", {"modules": ["mla_up_proj"]}),
    "norms": ("selective_recompute", {"modules": ["mla_up_proj", "layernorm"]}),
    "compressed": ("selective_recompute", {"activations": ["q_latent", "kv_latent", "k_rope"]}),
}
METHODS = OF_EXPERTS | OF_LATENT
SPLIT = ("mst", "mst+full", "moe+mst")
"""Methods that split products; the others compute what keep_all computes, in the same kernels."""
FATES = ("offload", "offload-layers", "offload-slots", "full-kept")
PLANS = (*FATES, *cases.EXPERT_PLANS)
QUICK = ("dp2-ep2-pp2", "tp2-ep2-pp2")
"""The two layouts of eight ranks that the short run executes, in one launch; in the first two ranks
hold the same experts."""
SIZES: dict[int, tuple[str, ...]] = {
    2: ("ep2", "ep2-zero0", "cp2-ep2", "tp2-ep2", "tp2-etp2", "tp2-etp1"),
    4: ("dp2-ep2", "tp2-dp2-ep2"),
    8: (*QUICK, "ep4-pp2", "tp2-ep2-etp1-pp2"),
}


def method(
    layout: str, name: str, model: str = "mixture", precision: Any = "fp64", **facts: Any
) -> Case:
    """One step of a method, on a model with other `facts`."""
    deep = cases.two_a_chunk(layout, MODELS[model])
    given = cases.tiny(layout, precision, structs.replace(deep, **facts))
    return grid.one_step(f"{layout} {model} {name}", given, METHODS[name])


def raw(layout: str, plan: str, model: str = "mixture") -> Case:
    """One step of a plan that no method makes."""
    given = cases.case(layout, plan, model=cases.two_a_chunk(layout, MODELS[model]))
    return replace(given, name=f"{layout} {model} {plan}", steps=1)


@cache
def kept(model: str, precision: str = "fp64") -> Result:
    return laws.run_here(method("one", "keep_all", model, precision))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *((model, name) for model in ("mixture", "shared") for name in OF_EXPERTS),
        *((model, name) for model in ("latent", "both") for name in OF_LATENT),
        *(("ungated", name) for name in ("parts", "balanced-all")),
        ("whole-queries", "mla_up_proj"),
    ],
)
def test_every_method_is_lossless_on_one_process(model: str, name: str) -> None:
    """Experts without a gate keep what their weights scale; queries may be projected at once."""
    case = method("one", name, model)
    result = laws.run_here(case)
    grid.check_step(case, result, kept(model))
    assert name in SPLIT or laws.same_bits(result, kept(model))
    assert ("q_latent" in case.problem.layer(0).activations) == (model in ("latent", "both"))


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *((model, plan) for model in ("mixture", "shared") for plan in PLANS),
        *(("latent", plan) for plan in FATES),
    ],
)
def test_every_fate_is_lossless_on_one_process(model: str, plan: str) -> None:
    case = raw("one", plan, model)
    result = laws.run_here(case)
    grid.check_step(case, result, kept(model))
    assert result.ranks[0].offload_bytes > 0


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(("shared", name) for name in ("full_recompute", "moe", "parts")),
        *(("latent", name) for name in ("full_recompute", "mla_up_proj")),
    ],
)
def test_recomputation_gives_the_same_bits_in_bf16(model: str, name: str) -> None:
    """Probabilities of experts are fp32 there, and bytes the ledger's."""
    case = method("one", name, model, "bf16")
    result = laws.run_here(case)
    grid.check_twin(case, result)
    assert laws.same_bits(result, kept(model, "bf16"))


@pytest.mark.parametrize("name", ["full_recompute", "norms", "mst"])
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.full)])
def test_one_more_token_is_predicted_on_one_process(tied: bool, name: str) -> None:
    """The loss of two tokens and the gradients of weights that both use, also in pieces."""
    case = method("one", name, "prediction", tied_embeddings=tied)
    grid.check_step(case, laws.run_here(case))


@pytest.mark.parametrize(
    ("name", "seq_len", "stages", "pp", "stage"),
    [
        ("deepseek-v3", 4096, "Et|(tt|)*30mL", 8, 7),
        ("deepseek-v3", 4096, "Et|(tt|)*30mL", 8, 0),
        ("kimi-k2", 6144, "Et*3|(t*4|)*14ttL", 16, 15),
    ],
)
@pytest.mark.full  # small models with predictions: EIGHT
def test_layers_of_papers_have_their_ledgers_bytes_traced(
    name: str, seq_len: int, stages: str, pp: int, stage: int
) -> None:
    """On 256 ranks, with prediction; lengths with which experts' loads are equal."""
    spec = Job(
        model=name, cluster="gb200-nvl72", system="rematbench", gpus=256, seq_len=seq_len,
        tp=2 if pp == 8 else 1, pp=pp, ep=256 // pp, etp=1, stages=stages, global_batch=128,
        vpp=len(read_stages(stages)) // pp,
    )  # fmt: skip
    given = make_problem(spec)
    plan = plan_of(given, "selective_recompute", modules=("mla_up_proj", "layernorm"))
    traced = trace_rank(given, plan, stage)
    assert traced.bytes_after == list(live_bytes(lower(plan, given).ranks[stage].actions()))


@pytest.mark.parametrize(("layout", "words"), TABLES["predictions"])
def test_a_prediction_that_is_not_executed_is_refused_by_name(
    layout: dict[str, Any], words: str
) -> None:
    given = problem(model=structs.replace(LATENT, mtp_layers=1), **layout)
    assert any(words in name for name in refusals(given, given.base_plan))


def is_wrong_in_gradients_alone(case: Case) -> bool:
    result = laws.run_here(case)
    return not laws.bytes_differ(case, result) and (
        laws.gradient_error(case, result) > grid.TOLERANCE
    )


def test_rows_at_the_wrong_expert_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation of the gradient law: every expert has another one's rows."""
    runs = experts._runs

    def shifted(call: Call, rows: int) -> list[tuple[str, slice]]:
        names, parts = zip(*runs(call, rows), strict=True)
        return list(zip(names[1:] + names[:1], parts, strict=True))

    monkeypatch.setattr(experts, "_runs", shifted)
    assert is_wrong_in_gradients_alone(method("one", "keep_all"))


def test_a_gradient_of_this_ranks_heads_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation of the gradient law: shared columns of keys get one head's gradient."""
    join = operators.OPERATORS["k_join"]

    def first(call: Call) -> Tensors:
        found = join.backward(call)
        heads = call.grads[0].view(call.grads[0].shape[0], call.model.shapes.heads, -1)
        return found | {"k_turned": heads[:, 0, -found["k_turned"].shape[-1] :].clone()}

    monkeypatch.setitem(operators.OPERATORS, "k_join", join._replace(backward=first))
    assert is_wrong_in_gradients_alone(method("one", "keep_all", "latent"))


@cache
def launched(*which: tuple[str, str, str]) -> dict[str, tuple[Case, Result]]:
    """One launch of cases: (layout, model, method or plan)."""
    every = [
        method(layout, name, model) if name in METHODS else raw(layout, name, model)
        for layout, model, name in which
    ]
    return laws.launch(every)


EIGHT = (
    ("dp2-ep2-pp2", "mixture", "moe"),
    ("tp2-ep2-pp2-vpp2-stages", "prediction", "mla_up_proj"),
)
"""EP 2 x PP 2 of two replicas, whose experts run again; EP 2 x TP 2 x PP 2 with a shared expert,
latent attention, interleaved chunks of stated stages and a prediction."""
FURTHER = (("tp2-ep2-pp2", "shared", "keep_all"), ("tp2-ep2-pp2-vpp2", "both", "mla_up_proj"))


@pytest.mark.parametrize("which", [EIGHT, pytest.param(FURTHER, marks=pytest.mark.full)])
def test_eight_ranks_compute_what_one_process_computes(which: Any) -> None:
    for case, result in launched(*which).values():
        grid.check_step(case, result)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_other_layouts_compute_what_one_process_computes(size: int) -> None:
    which = [
        (layout, model, name)
        for layout in SIZES[size]
        for model, name in (("mixture", "keep_all"), ("shared", "moe"))
    ]
    layouts = {2: ("tp2", "tp2-no-sp", "cp2", "dp2-zero3", "pp2-vpp2"), 4: ("tp2-pp2", "tp2-cp2")}
    which += [
        (layout, "latent", name) for layout in layouts[size] for name in ("keep_all", "norms")
    ]
    which += [(layout, "next", "norms") for layout in layouts[size] if "-" not in layout]
    for case, result in launched(*which).values():
        grid.check_step(case, result)


@pytest.mark.full
def test_the_order_of_ranks_changes_nothing() -> None:
    """Experts fold onto neighbours, whatever dimension these lie along."""
    orders = (("dp", "tp", "cp", "pp"), ("pp", "dp", "cp", "tp"))
    every = [
        grid.in_order(method(layout, "keep_all"), *order) for layout in SIZES[4] for order in orders
    ]
    for case, result in laws.launch(every).values():
        grid.check_step(case, result)


@pytest.mark.soak
@pytest.mark.parametrize("size", SIZES)
def test_every_method_is_lossless_on_every_layout(size: int) -> None:
    for layout in SIZES[size]:
        for model in ("mixture", "shared", "ungated"):
            results = launched(*((layout, model, name) for name in (*OF_EXPERTS, *PLANS)))
            keep = results[f"{layout} {model} keep_all"][1]
            for case, result in results.values():
                grid.check_step(case, result, keep)


@pytest.mark.parametrize(
    ("layout", "model", "name"),
    [
        ("dp2-ep2-pp2", "shared", "moe"),
        ("tp2-ep2-pp2", "both", "norms"),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (
                *((layout, "shared", "balanced-all") for layout in QUICK),
                ("tp2-ep2-pp2", "shared", "moe"),
                ("tp2-pp2", "latent", "norms"),
            )
        ),
    ],
)
def test_every_stage_has_its_ledgers_bytes_traced(layout: str, model: str, name: str) -> None:
    case = method(layout, name, model, "bf16")
    for stage, rank in enumerate(lower(case.plan, case.problem).ranks):
        traced = trace_rank(case.problem, case.plan, stage)
        assert traced.bytes_after == list(live_bytes(rank.actions()))


@pytest.mark.parametrize("layout", cases.EXPERT_LAYOUTS)
def test_every_rank_sends_as_many_tokens_to_every_expert(layout: str) -> None:
    """And the ranks of a group of experts hold each expert once."""
    given = cases.tiny(layout)
    lay, order = given.layout, given.system.parallel.rank_order
    held: dict[tuple[int, int], set[int]] = {}
    for rank in range(lay.gpus // lay.pp):
        place = coordinates(rank, lay, order)
        model = RankModel(given, given.base_plan, place, torch.device("cpu"), seed=0)
        counts = model.chosen.view(-1).bincount(minlength=EXPERTS.count)
        assert (counts == model.chosen.numel() // EXPERTS.count).all()
        folded = expert_place(lay, order, place)
        held.setdefault((folded.etp, folded.edp), set()).update(model.held_experts)
    assert all(group == set(range(EXPERTS.count)) for group in held.values())


REFUSED: dict[str, dict[str, Any]] = TABLES["refused"]


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_by_name(words: str) -> None:
    changes = dict(REFUSED[words])
    given = cases.tiny("ep2")
    system = with_facts(given.system, **{k: v for k, v in changes.items() if k in FACTS})
    parts = (given.workload, given.workload.model, EXPERTS)
    work, model, mixture = (
        structs.replace(part, **{k: v for k, v in changes.items() if k in part.__struct_fields__})
        for part in parts
    )
    work = structs.replace(work, model=structs.replace(model, experts=mixture))
    changed = remade(given, system=system, workload=work)
    assert refusals(changed, changed.base_plan) == [words]


def test_states_of_experts_stay_on_the_device() -> None:
    case = cases.in_host_memory(method("ep2", "keep_all"), "optimizer")
    assert "states of experts in host memory" in refusals(case.problem, case.plan)


def test_norms_of_heads_need_sequence_parallelism_beside_tensor_parallelism() -> None:
    model = structs.replace(cases.TINY, qk_norm=True)
    for layout, refused in (("tp2", []), ("tp2-no-sp", ["norms over each head with tensor"])):
        given = cases.tiny(layout, model=model)
        every = refusals(given, given.base_plan)
        assert [words.partition(" parallelism")[0] for words in every] == refused


def test_unequal_heads_are_one_operator_that_equals_plain_attention() -> None:
    """Also against keys of a longer prefix, whose last rows see them all."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, 3, 8, 12, dtype=torch.float64, requires_grad=True) for _ in "qk")
    v = torch.randn(2, 3, 8, 6, dtype=torch.float64, requires_grad=True)
    scores = (q @ k.mT / 12**0.5).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
    plain = scores.softmax(-1) @ v
    out, lse = attn.flash(q.detach(), k.detach(), v.detach(), True)
    grad = torch.randn_like(plain)
    found = attn.flash_backward(grad, q.detach(), k.detach(), v.detach(), out, lse, True)
    torch.testing.assert_close(out, plain.detach())
    torch.testing.assert_close(lse, scores.logsumexp(-1).detach())
    torch.testing.assert_close(found, torch.autograd.grad(plain, (q, k, v), grad))
