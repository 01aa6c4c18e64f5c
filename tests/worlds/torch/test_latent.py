"""Latent attention: the ledger's bytes, the autograd model's gradients and keep_all's numbers, on
one process and on grids of tensor, expert and pipeline parallelism."""

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
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.torch import attention_backends as attn
from rematbench.worlds.torch import operators
from rematbench.worlds.torch.case import Case, Result
from rematbench.worlds.torch.operands import Call, Tensors
from rematbench.worlds.torch.single_rank import trace_rank
from tests.problems import plan_of, problem
from tests.worlds.torch import cases, grid, laws
from tests.worlds.torch.cases import EXPERTS, LATENT

assert LATENT.latent is not None
MODELS = {
    "latent": LATENT,
    "whole-queries": structs.replace(LATENT, latent=structs.replace(LATENT.latent, q_rank=0)),
    "experts": structs.replace(
        LATENT, experts=structs.replace(EXPERTS, router="sigmoid", shared_ffn=48, dense_layers=(0,))
    ),
}
MODELS["next"] = structs.replace(LATENT, mtp_layers=1)
MODELS["prediction"] = structs.replace(MODELS["experts"], mtp_layers=1)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "keep_all": ("keep_all", {}),
    "full_recompute": ("full_recompute", {}),
    "mla_up_proj": ("selective_recompute", {"modules": ["mla_up_proj"]}),
    "norms": ("selective_recompute", {"modules": ["mla_up_proj", "layernorm"]}),
    "compressed": ("selective_recompute", {"activations": ["q_latent", "kv_latent", "k_rope"]}),
    "balanced-all": ("balanced_checkpointing", {"point": "all"}),
    "memo": ("memo", {"alpha": 0.5, "exempt_layers": 1}),
    "mst": ("mst", {"mlp_chunks": 3, "head_chunks": 5}),
    "karma": ("karma", {"resident": 0}),
}
PLANS = ("offload", "offload-layers", "offload-slots", "full-kept")


def method(
    layout: str, name: str, model: str = "latent", precision: Any = "fp64", **facts: Any
) -> Case:
    """One step of a method, on a model with other `facts`."""
    deep = cases.two_a_chunk(layout, MODELS[model])
    given = cases.tiny(layout, precision, structs.replace(deep, **facts))
    return grid.one_step(f"{layout} {model} {name}", given, METHODS[name])


@cache
def kept(model: str, precision: str = "fp64") -> Result:
    return laws.run_here(method("one", "keep_all", model, precision))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", ["latent", "experts"])
def test_every_method_is_lossless_on_one_process(model: str, name: str) -> None:
    case = method("one", name, model)
    grid.check_step(case, laws.run_here(case), kept(model))


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
        pytest.param("deepseek-v3", 4096, "Et|(tt|)*30mL", 8, 0, marks=pytest.mark.full),
        pytest.param("kimi-k2", 6144, "Et*3|(t*4|)*14ttL", 16, 15, marks=pytest.mark.full),
    ],
)
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


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"pp": 4, "global_batch": 4, "stages": "Et|t|m|L"}, "between the ends of the pipeline"),
        ({"tp": 2, "sp": False, "global_batch": 2}, "without sequence parallelism"),
        ({"dp": 2, "zero_stage": 3, "global_batch": 4}, "ZeRO stages 2 and 3 with a prediction"),
    ],
)
def test_a_prediction_that_is_not_executed_is_refused_by_name(
    layout: dict[str, Any], words: str
) -> None:
    given = problem(model=structs.replace(LATENT, mtp_layers=1), **layout)
    assert any(words in name for name in refusals(given, given.base_plan))


def test_queries_may_be_projected_at_once() -> None:
    case = method("one", "mla_up_proj", "whole-queries")
    assert "q_latent" not in case.problem.layer(0).activations
    grid.check_step(case, laws.run_here(case), kept("whole-queries"))


@pytest.mark.parametrize("plan", PLANS)
def test_every_fate_is_lossless_on_one_process(plan: str) -> None:
    case = cases.case("one", plan, model=cases.two_a_chunk("one", LATENT))
    grid.check_step(case, laws.run_here(case))


@pytest.mark.parametrize("name", ["full_recompute", "mla_up_proj"])
def test_recomputation_gives_the_same_bits_in_bf16(name: str) -> None:
    case = method("one", name, "latent", "bf16")
    result = laws.run_here(case)
    grid.check_twin(case, result)
    assert laws.same_bits(result, kept("latent", "bf16"))


def test_a_gradient_of_this_ranks_heads_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation of the gradient law: shared columns of keys get one head's gradient."""
    join = operators.BACKWARD_INPUT["k_join"]

    def first(call: Call) -> Tensors:
        found = join(call)
        heads = call.grads[0].view(call.grads[0].shape[0], call.model.shapes.heads, -1)
        return found | {"k_turned": heads[:, 0, -found["k_turned"].shape[-1] :].clone()}

    monkeypatch.setitem(operators.BACKWARD_INPUT, "k_join", first)
    case = method("one", "keep_all")
    result = laws.run_here(case)
    assert laws.bytes_differ(case, result) == []
    assert laws.gradient_error(case, result) > grid.TOLERANCE


@cache
def launched(*which: tuple[str, str, str]) -> dict[str, tuple[Case, Result]]:
    """One launch of cases: (layout, model, method)."""
    return laws.launch([method(layout, name, model) for layout, model, name in which])


def test_eight_ranks_compute_what_one_process_computes() -> None:
    """EP 2 x TP 2 x PP 2 x VPP 2, with experts; and with stated stages and a prediction."""
    which = ("tp2-ep2-pp2-vpp2", "experts"), ("tp2-ep2-pp2-vpp2-stages", "prediction")
    for case, result in launched(*((*each, "mla_up_proj") for each in which)).values():
        grid.check_step(case, result)


@pytest.mark.full
@pytest.mark.parametrize(
    "layouts", [("tp2", "tp2-no-sp", "cp2", "dp2-zero3", "pp2-vpp2"), ("tp2-pp2", "tp2-cp2")]
)
def test_other_layouts_compute_what_one_process_computes(layouts: tuple[str, ...]) -> None:
    which = [(layout, "latent", name) for layout in layouts for name in ("keep_all", "norms")]
    which += [(layout, "next", "norms") for layout in layouts if "-" not in layout]
    for case, result in launched(*which).values():
        grid.check_step(case, result)


@pytest.mark.parametrize("layout", ["tp2-pp2", "tp2-ep2-pp2"])
def test_every_stage_has_its_ledgers_bytes_traced(layout: str) -> None:
    model = "experts" if "ep" in layout else "latent"
    case = method(layout, "norms", model, "bf16")
    for stage, rank in enumerate(lower(case.plan, case.problem).ranks):
        traced = trace_rank(case.problem, case.plan, stage)
        assert traced.bytes_after == list(live_bytes(rank.actions()))


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
