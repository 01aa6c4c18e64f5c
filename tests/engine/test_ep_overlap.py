"""Exchanges of experts beside another micro-batch: which passes, the seconds that stay, the bytes
of a layer, and what Megatron-core refuses."""

from math import fsum
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.lowering.passes.emit_backward import BESIDE
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.simulate.beside import OpSeconds, _left, exposed_shares
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import ActionCosts
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.problems import leaner_exchanges, make_problem, overlapping
from rematbench.evaluate.proof import check
from rematbench.host.declared import flat
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.job import Job
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.load import load_system
from rematbench.inputs.system import with_facts
from rematbench.plan import Plan, PlanError
from rematbench.problem import Problem
from rematbench.workload import Experts
from rematbench.worlds.records.record import (
    Record,
    decode_record,
    encode_record,
    provenance,
    run_spec,
)
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.records.suite_cells import recorded_cell
from tests.problems import LLAMA, all_methods, layers, plan_of, problem, remade
from tests.tables import tables

TABLES = tables(__file__)

MIXTURE = replace(LLAMA, experts=Experts(count=8, active=2, ffn=64))
ON: dict[str, Any] = {"ep_overlap": "interleaved", "features": ("ep_overlap",)}


def given(model: Any = MIXTURE, *, on: dict[str, Any] = ON, **layout: Any) -> Problem:
    degrees = {"dp": 4, "ep": 4, "global_batch": 12, **layout}
    return remade(problem(model=model, system_changes=on, **degrees), evaluator=evaluate)


def marks(found: Problem, plan: Plan | None = None, rank: int = 0) -> list[tuple[str, int, str]]:
    """(direction, micro-batch, pass beside) of each exchange of the first layer's dispatch."""
    program = lower(plan or found.base_plan, found)
    check(program)
    seen = []
    for action, micro_batch, chunk in program.ranks[rank].actions():
        if action.op == "dispatch" and action.part == "L0" and chunk == 0:
            made = any(alloc.storage.is_gradient for alloc in action.allocs)
            seen.append(("B" if made else "F", micro_batch, action.exchange.beside))
    return seen


def test_a_backward_is_paired_with_the_forward_that_follows_it() -> None:
    assert marks(given()) == [
        ("F", 0, ""),
        ("B", 0, "forward"),
        ("F", 1, "backward"),
        ("B", 1, "forward"),
        ("F", 2, "backward"),
        ("B", 2, ""),
    ]
    assert {mark for *_, mark in marks(given(on={}))} == {""}
    alone = given(global_batch=4)
    assert {mark for *_, mark in marks(alone)} == {""}
    forwards_first = replace(given().base_plan, schedule="gpipe")
    assert [mark for *_, mark in marks(given(), forwards_first)] == [""] * 6


def test_a_layer_that_predicts_one_more_token_is_paired_as_any_other() -> None:
    """On the last rank's last chunk, with the layer before it (megatron-core 0.16.1,
    model_chunk_schedule_plan.py); alone on a rank Megatron-core refuses it."""
    model = replace(MIXTURE, mtp_layers=1)
    found = given(layers(4, model), pp=2, vpp=2, global_batch=16)
    program = lower(found.base_plan, found)
    check(program)
    beside = {
        action.part: action.exchange.beside
        for action, micro_batch, chunk in program.ranks[1].actions()
        if action.op == "dispatch" and (micro_batch, chunk) == (1, 1)
    }
    assert beside["L1"] == beside["L0"] != ""
    with pytest.raises(LayoutError, match="pp must be larger than 1"):
        given(model)


def test_an_interleaved_pipeline_pairs_its_steady_passes() -> None:
    found = given(layers(8, MIXTURE), pp=2, vpp=2, dp=4, global_batch=16)
    first = marks(found)
    warm = [mark for direction, _, mark in first if direction == "F"]
    assert warm == ["", "", "", "backward"]  # (vpp - 1) pp + 2 (pp - 1) + 1 alone, over chunks
    cool = [mark for direction, _, mark in first if direction == "B"]
    assert cool[-1] == ""
    assert "forward" in cool


@pytest.mark.parametrize(
    ("exchange", "inputs", "weights", "forward", "delayed", "left"), TABLES["left"]
)
def test_what_is_left_of_an_exchange(
    exchange: float, inputs: float, weights: float, forward: float, delayed: bool, left: Any
) -> None:
    compute = OpSeconds(forward, inputs, weights)
    assert [*_left(exchange, compute, delayed=delayed)] == left


def ep_seconds(found: Problem, plan: Plan) -> float:
    """Seconds of the all-to-alls of a step."""
    program = lower(plan, found)
    costs = ActionCosts(found, program)
    return fsum(
        costs(action, rank.rank)
        for rank in program.ranks
        for action, _, _ in rank.actions()
        if action.kind is Kind.ALL_TO_ALL
    )


def test_paired_passes_wait_for_what_is_left_and_lose_what_collectives_take() -> None:
    model = replace(layers(4, MIXTURE), hidden=1024, head_dim=128, num_heads=8, num_kv_heads=8)
    model = replace(model, experts=Experts(count=8, active=2, ffn=4096))
    on, off = given(model, seq_len=16384), given(model, on={}, seq_len=16384)
    table, comm_s = on.layer(0), on.cost.comm_s
    shares = exposed_shares(on, table, 0, comm_s)
    stall = on.cost.overlap_factor("ep") - 1.0
    assert stall > 0
    assert all(stall <= one <= 1.0 for share in shares.values() for one in share)
    assert min(one for share in shares.values() for one in share) < 1.0
    seconds = {op.name: comm_s(op.reduce, 0) for op in table.ops if op.exchanges and op.reduce}
    saved = fsum(
        seconds[name] * (2.0 - share.forward - share.backward) for name, share in shares.items()
    )
    pairs, count = 2, 4
    plan = on.base_plan
    assert ep_seconds(on, plan) == pytest.approx(ep_seconds(off, plan) - pairs * count * saved)
    assert evaluate(on, plan).step_s < evaluate(off, plan).step_s
    program = lower(plan, on)
    whole = simulate(program, ActionCosts(on, program)).step_s
    assert whole == pytest.approx(evaluate(on, plan).step_s, rel=1e-9)


def test_delayed_weight_gradients_never_lengthen_an_exchange() -> None:
    for ffn in (64, 4096, 16384):
        model = replace(MIXTURE, hidden=1024, experts=Experts(count=8, active=2, ffn=ffn))
        found, delayed = (
            given(model, on=ON | {"delayed_wgrad": value}, seq_len=2048) for value in (False, True)
        )
        shares = [exposed_shares(one, one.layer(0), 0, one.cost.comm_s) for one in (found, delayed)]
        for name, share in shares[0].items():
            assert shares[1][name].forward == share.forward
            assert shares[1][name].backward <= share.backward


def test_blocking_launches_overlap_nothing() -> None:
    found = given(on=ON | {"launch_blocking": True})
    assert {mark for *_, mark in marks(found)} == {""}


def test_a_layer_of_the_other_micro_batch_is_alive_beside_a_backward() -> None:
    """Where the head does not bind, the peak grows by what a layer keeps."""
    model = replace(layers(4, MIXTURE), vocab=64)
    on, off = given(model), given(model, on={})
    peaks = [max(evaluate(one, one.base_plan).peak_device_bytes) for one in (on, off)]
    assert peaks[0] - peaks[1] == on.layer(0).saved_bytes
    lean = plan_of(on, "selective_recompute", modules=["moe_act", "layernorm"])
    kept = on.layer(0).saved_bytes - sum(
        on.layer(0).activations[name].nbytes
        for name in ("expert_fc2_in", "attn_norm_out", "mlp_norm_out")
    )
    allocs = [
        alloc.nbytes
        for action in every(on, lean)
        for alloc in action.allocs
        if alloc.storage is BESIDE
    ]
    assert allocs == [kept] * 2


def every(found: Problem, plan: Plan) -> list[Action]:
    program = lower(plan, found)
    check(program)
    return [action for rank in program.ranks for action, _, _ in rank.actions()]


@pytest.mark.parametrize(
    ("method", "settings"), [("full_recompute", {}), ("selective_recompute", {"modules": ["moe"]})]
)
def test_what_would_send_tokens_again_is_refused(method: str, settings: dict[str, Any]) -> None:
    found = given()
    plan = plan_of(found, method, **settings)
    with pytest.raises(PlanError, match="disable moe in recompute_modules, and full recomputation"):
        lower(plan, found)
    lower(plan, given(on={}))


def test_a_stack_that_runs_layers_again_waits_for_the_exchanges_of_that() -> None:
    """NVIDIA/Megatron-LM pull request 5869: those exchanges are exposed by design."""
    found = given(on=ON | {"features": ("ep_overlap", "ep_overlap_recompute")})
    plan = plan_of(found, "full_recompute")
    both = [("F", 0, ""), ("B", 0, "forward"), ("F", 1, "backward")]
    assert marks(found, plan)[:4] == [both[0], *both]
    rooms = [a.nbytes for one in every(found, plan) for a in one.allocs if a.storage is BESIDE]
    assert rooms == [found.layer(0).activations["layer_input"].nbytes] * 2
    with pytest.raises(PlanError, match="disable moe in recompute_modules"):
        lower(plan_of(found, "selective_recompute", modules=["moe"]), found)


@pytest.mark.parametrize(("layout", "changes", "words"), TABLES["refused"])
def test_layouts_that_megatron_core_refuses(
    layout: dict[str, int], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        given(on=ON | changes, **layout)
    given(on={}, **layout)
    if "pp" in layout:
        given(on=ON | {"ep_overlap": "always"}, **layout)


def test_a_run_asks_for_the_overlap_of_a_stack_that_has_it() -> None:
    stack = load_system("megatron-core-2026")
    assert (stack.experts.ep_overlap, stack.experts.delayed_wgrad) == ("none", False)
    on = overlapping(stack, "delayed_wgrad")
    assert (on.experts.ep_overlap, on.experts.delayed_wgrad) == ("interleaved", True)
    assert overlapping(on, "on").experts.delayed_wgrad is False
    assert overlapping(on, "off") == stack
    assert overlapping(on, None) == on
    assert "ep_overlap" not in load_system("megatron-core").accepts.features


def test_a_record_asks_for_the_overlap_again() -> None:
    made = make_problem(
        Job(
            model="tiny-experts", cluster="h800-80gb", system="megatron-core-0.16", gpus=4,
            seq_len=64, global_batch=8, ep=4, ep_overlap="delayed_wgrad",
        )
    )  # fmt: skip
    method = all_methods().resolve("keep_all", {}, made)
    spec = run_spec(made, method)
    assert spec.stack.ep_overlap == "delayed_wgrad"
    made_of = Record(run_id="", spec=spec, status="ok", provenance=provenance())
    assert decode_record(encode_record(made_of)) == made_of
    again = recorded_cell("one", made_of, all_methods()).problem
    assert again.system == made.system


def test_our_executor_has_no_second_micro_batch() -> None:
    found = given()
    named = refusals(found, found.base_plan)
    assert "exchanges of experts that overlap another micro-batch" in named


def test_a_job_chooses_the_dispatcher_of_its_stack() -> None:
    job = Job(
        model="tiny-experts", cluster="h800-80gb", system="megatron-core-0.16", gpus=4,
        seq_len=64, global_batch=8, ep=4,
    )  # fmt: skip
    plain, chosen = make_problem(job), make_problem(job.changed(dispatcher="deepep"))
    assert (plain.system.experts.dispatcher, chosen.system.experts.dispatcher) == (
        "alltoall",
        "deepep",
    )
    assert chosen.chosen.dispatcher == "deepep"
    assert "deepep and hybridep" in leaner_exchanges(plain)
    assert "--ep-overlap on" in leaner_exchanges(chosen)
    assert "--dispatcher" not in leaner_exchanges(chosen)
    assert not leaner_exchanges(make_problem(job.changed(dispatcher="deepep", ep_overlap="on")))
    assert not leaner_exchanges(make_problem(job.changed(ep=1)))
    with pytest.raises(ConfigError, match="dispatcher: 'deepep': tiny-llama has no experts"):
        make_problem(Job(**{**flat(job), "model": "tiny-llama", "ep": 1, "dispatcher": "deepep"}))


# -- gEMM overlap exists only over links that the library has it for -------------------------------


def linked(tp: int, system: str = "nemo-24.12") -> Problem:
    spec = Job(
        model="llama-3.1-70b",
        cluster="h100-80gb",
        system=system,
        gpus=64,
        seq_len=8192,
        global_batch=64,
        tp=tp,
    )
    stack = with_facts(load_system(system), gemm_overlap_links="nvlink")
    return make_problem(replace(spec, system=stack))


def test_a_group_that_leaves_the_node_overlaps_only_in_the_backward() -> None:
    assert [linked(tp).tp_overlap for tp in (4, 8, 16)] == ["gemm", "gemm", "backward"]
    assert [linked(tp, "megatron-core").tp_overlap for tp in (8, 16)] == ["backward", "backward"]


def test_the_overlap_changes_the_step_only_where_it_acts() -> None:
    def step_s(problem: Problem, **facts: str) -> float:
        changed = remade(problem, system=with_facts(problem.system, **facts))
        return changed.cost.evaluate(changed.base_plan).step_s

    inside, across = linked(8), linked(16)
    assert step_s(inside) == step_s(inside, gemm_overlap_links="all")
    assert step_s(across) > step_s(across, gemm_overlap_links="all")
    assert step_s(across) == step_s(across, tp_overlap="backward")


def test_an_nvlink_domain_larger_than_a_server_keeps_the_overlap() -> None:
    problem = linked(16)
    domain = replace(problem.cluster, gpus_per_node=64)
    assert remade(problem, cluster=domain).tp_overlap == "gemm"
