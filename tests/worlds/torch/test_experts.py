"""Experts: the ledger's bytes, the autograd model's gradients and keep_all's numbers, on one
process and on grids of expert, tensor and pipeline parallelism; what is refused by name."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from msgspec import structs

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.inputs.system import FACTS, with_facts
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.torch import experts
from rematbench.worlds.torch.case import Case, Result
from rematbench.worlds.torch.groups import coordinates, expert_place
from rematbench.worlds.torch.operands import Call
from rematbench.worlds.torch.rank_model import RankModel
from rematbench.worlds.torch.single_rank import trace_rank
from tests.problems import remade
from tests.worlds.torch import cases, grid, laws
from tests.worlds.torch.cases import EXPERTS, MIXTURE, SHARED

MODELS = {"mixture": MIXTURE, "shared": SHARED, "ungated": structs.replace(MIXTURE, mlp="gelu")}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "keep_all": ("keep_all", {}),
    "full_recompute": ("full_recompute", {}),
    "moe": ("selective_recompute", {"modules": ["moe"]}),
    "parts": ("selective_recompute", {"modules": ["moe_act", "shared_experts", "layernorm"]}),
    "balanced": ("balanced_checkpointing", {}),
    "balanced-all": ("balanced_checkpointing", {"point": "all"}),
    "memo": ("memo", {"alpha": 0.5, "exempt_layers": 1}),
    "mst": ("mst", {"mlp_chunks": 3, "head_chunks": 5}),
    "mst+full": ("mst+full_recompute", {"mlp_chunks": 3, "head_chunks": 5}),
    "moe+mst": ("selective_recompute+mst", {"modules": ["moe"], "head_chunks": 5}),
    "karma": ("karma", {"resident": 0}),
}
BITWISE = ("full_recompute", "moe", "parts", "balanced", "balanced-all", "memo", "karma")
"""Methods that compute what keep_all computes, in the same kernels."""
PLANS = ("offload", "offload-layers", "offload-slots", "full-kept", *cases.EXPERT_PLANS)
QUICK = ("dp2-ep2-pp2", "tp2-ep2-pp2")
"""The two layouts of eight ranks that the short run executes, in one launch; in the first two ranks
hold the same experts."""
SIZES: dict[int, tuple[str, ...]] = {
    2: ("ep2", "ep2-zero0", "cp2-ep2", "tp2-ep2", "tp2-etp2", "tp2-etp1"),
    4: ("dp2-ep2", "tp2-dp2-ep2"),
    8: (*QUICK, "ep4-pp2", "tp2-ep2-etp1-pp2"),
}


def method(layout: str, name: str, model: str = "mixture", precision: Any = "fp64") -> Case:
    """One step of a method."""
    given = cases.tiny(layout, precision, cases.two_a_chunk(layout, MODELS[model]))
    return grid.one_step(f"{layout} {model} {name}", given, METHODS[name])


def raw(layout: str, plan: str, model: str = "mixture") -> Case:
    """One step of a plan that no method makes."""
    given = cases.case(layout, plan, model=cases.two_a_chunk(layout, MODELS[model]))
    return replace(given, name=f"{layout} {model} {plan}", steps=1)


@cache
def kept(model: str, precision: str = "fp64") -> Result:
    return laws.run_here(method("one", "keep_all", model, precision))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("model", ["mixture", "shared"])
def test_every_method_is_lossless_on_one_process(model: str, name: str) -> None:
    case = method("one", name, model)
    result = laws.run_here(case)
    grid.check_step(case, result, kept(model))
    if name in BITWISE:
        assert laws.same_bits(result, kept(model))


@pytest.mark.parametrize("name", ["parts", "balanced-all"])
def test_experts_without_a_gate_keep_what_their_weights_scale(name: str) -> None:
    case = method("one", name, "ungated")
    grid.check_step(case, laws.run_here(case), kept("ungated"))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["mixture", "shared"])
def test_every_fate_is_lossless_on_one_process(model: str, plan: str) -> None:
    case = raw("one", plan, model)
    result = laws.run_here(case)
    grid.check_step(case, result, kept(model))
    assert result.ranks[0].offload_bytes > 0


@pytest.mark.parametrize("name", ["full_recompute", "moe", "parts"])
def test_recomputation_gives_the_same_bits_in_bf16(name: str) -> None:
    """Probabilities are fp32 there, and bytes the ledger's."""
    case = method("one", name, "shared", "bf16")
    result = laws.run_here(case)
    grid.check_twin(case, result)
    assert laws.same_bits(result, kept("shared", "bf16"))


def test_rows_at_the_wrong_expert_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation of the gradient law: every expert has another one's rows."""
    runs = experts._runs

    def shifted(call: Call, rows: int) -> list[tuple[str, slice]]:
        names, parts = zip(*runs(call, rows), strict=True)
        return list(zip(names[1:] + names[:1], parts, strict=True))

    monkeypatch.setattr(experts, "_runs", shifted)
    case = method("one", "keep_all")
    result = laws.run_here(case)
    assert laws.bytes_differ(case, result) == []
    assert laws.gradient_error(case, result) > grid.TOLERANCE


@cache
def launched(*which: tuple[str, str, str]) -> dict[str, tuple[Case, Result]]:
    """One launch of cases: (layout, model, method or plan)."""
    every = [
        method(layout, name, model) if name in METHODS else raw(layout, name, model)
        for layout, model, name in which
    ]
    return laws.launch(every)


@pytest.mark.parametrize("layout", QUICK)
def test_eight_ranks_compute_what_one_process_computes(layout: str) -> None:
    """EP 2 x PP 2 of two replicas, whose experts run again; EP 2 x TP 2 x PP 2, with a shared
    expert."""
    results = launched(("dp2-ep2-pp2", "mixture", "moe"), ("tp2-ep2-pp2", "shared", "keep_all"))
    for case, result in results.values():
        if case.name.startswith(f"{layout} "):
            grid.check_step(case, result)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_other_layouts_compute_what_one_process_computes(size: int) -> None:
    which = [
        (layout, model, name)
        for layout in SIZES[size]
        for model, name in (("mixture", "keep_all"), ("shared", "moe"))
    ]
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
        for model in MODELS:
            results = launched(*((layout, model, name) for name in (*METHODS, *PLANS)))
            keep = results[f"{layout} {model} keep_all"][1]
            for case, result in results.values():
                grid.check_step(case, result, keep)


@pytest.mark.parametrize("layout", QUICK)
@pytest.mark.parametrize("name", ["moe", "balanced-all"])
def test_every_stage_has_its_ledgers_bytes_traced(layout: str, name: str) -> None:
    case = method(layout, name, "shared", "bf16")
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


REFUSED: dict[str, dict[str, Any]] = {
    "experts of unequal load (experts of the worst rank receive 1.5 times the balanced tokens)": {
        "imbalance": 1.5
    },
    "experts that the tokens of a rank do not fill evenly": {"count": 96, "active": 2},
    "the dispatcher allgather": {"dispatcher": "allgather"},
    "experts with biases": {"mlp_bias": True},
    "a gate of the shared expert": {"shared_ffn": 32, "shared_gate": True},
}


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
