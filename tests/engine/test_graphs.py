"""CUDA graphs of layers: a host issues each pass of a layer at once, and the graph holds bytes."""

from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.costs.operators.launches import COUNTS, uncaptured
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.program.program import Program
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.seconds import DIRECTION, ActionCosts, action_seconds
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.result import assumed
from rematbench.evaluate.verdict import GRAPH_BYTES, unknown_bytes
from rematbench.evidence.peaks import fits_word
from rematbench.inputs.layout import LayoutError
from rematbench.plan import MiniSequence, Plan, PlanError
from rematbench.problem import Problem
from rematbench.worlds.packages.flags import flags_of
from rematbench.worlds.packages.process import BaselineError, job, policy
from rematbench.worlds.records.refusals import refusals
from tests.cost_constants import ROUND
from tests.engine.test_experts import MIXTURE
from tests.engine.test_host_clock import timed, with_host
from tests.problems import BALANCED, FULL, all_methods, half, problem, refusal, remade, transfers
from tests.tables import tables

LAYOUTS: list[dict[str, Any]] = [
    {"global_batch": 3},
    {"tp": 2, "cp": 2, "pp": 2, "vpp": 2, "dp": 2, "global_batch": 8},
    {"system": "megatron-kwai", "tp": 2, "pp": 4, "global_batch": 6},
]
LAUNCH_S = 1e-4


def graphed(
    launch_s: float = LAUNCH_S,
    *,
    graphs: bool | str = True,
    system_changes: dict[str, Any] | None = None,
    **layout: Any,
) -> Problem:
    """A problem on a stack that captures layers, with a host that takes its time."""
    scope = graphs if isinstance(graphs, str) else ("none", "layer")[graphs]
    given = problem(system_changes={"cuda_graphs": scope, **(system_changes or {})}, **layout)
    return remade(given, calibration=with_host(launch_s))


def launches(given: Problem, program: Program, part: str) -> dict[Kind, int]:
    """Launches of rank 0's host in a step that belong to a part (L: layers), by kind of action."""
    costs, found = ActionCosts(given), dict[Kind, int]()
    for rank, action in timed(program):
        if rank == 0 and action.part.startswith(part):
            calls = round(costs.issue_s(action, rank) / given.cost.host_launch_s)
            found[action.kind] = found.get(action.kind, 0) + calls
    return {kind: count for kind, count in found.items() if count}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rules", [(), (BALANCED,)])
def test_a_layers_pass_is_issued_once(layout: dict[str, Any], rules: tuple[Any, ...]) -> None:
    given = graphed(**layout)
    program = lower(given.base_plan.with_rules(*rules), given)
    lay = given.layout
    passes = lay.num_micro_batches * given.workload.model.num_layers // lay.pp
    found = launches(given, program, "L")
    assert (found.pop(Kind.FORWARD), found.pop(Kind.BACKWARD_INPUT)) == (passes, passes)
    dp = {Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.OPTIMIZER}
    assert found.keys() <= dp, "only gradients and parameters are exchanged outside of graphs"
    eager = graphed(graphs=False, **layout)
    plan = eager.base_plan.with_rules(*rules)
    apart = launches(eager, lower(plan, eager), "L")
    assert apart[Kind.FORWARD] > 5 * passes
    ends = [launches(one, lower(plan, one), "E") for one in (given, eager)]
    assert ends[0] == ends[1], "the embedding is not captured"


def step_s(given: Problem) -> float:
    return simulate_chunks(lower(given.base_plan, given), action_seconds(given)).step_s


def test_graphs_shorten_a_step_that_waits_for_its_host_and_no_other() -> None:
    slow = [step_s(graphed(graphs=on, tp=2, pp=2, global_batch=4)) for on in (False, True)]
    at_once = [step_s(graphed(0.0, graphs=on, tp=2, pp=2, global_batch=4)) for on in (False, True)]
    assert slow[1] < 0.5 * slow[0]
    assert at_once[1] == at_once[0]
    assert slow[1] > at_once[1]


def test_pieces_inside_a_graph_are_no_launches() -> None:
    given = graphed(global_batch=2)
    ops = tuple(op.name for op in given.layer(0).ops if op.name in ("gate_up", "act", "down"))
    assert ops
    plan = replace(given.base_plan, mini_sequences=(MiniSequence(ops, 2),))
    whole = launches(given, lower(given.base_plan, given), "L")
    assert launches(given, lower(plan, given), "L") == whole


def test_a_graph_holds_a_share_of_what_its_layer_keeps() -> None:
    given, eager = graphed(global_batch=2), graphed(graphs=False, global_batch=2)
    kept = sum(given.layer(0).activations[name].nbytes for name in given.layer(0).saved)
    share = int(ROUND.common.graph_bytes_share * kept)
    assert share > 0
    (rank,) = lower(given.base_plan, given).ranks
    actions = [action for action, *_ in rank.actions()]
    made = [a for a in actions if a.allocs and a.allocs[0].storage.tensor == "graph"]
    assert {a.allocs[0].nbytes for a in made} == {share}
    freed = [each for a in actions for each in a.frees if each.tensor == "graph"]
    assert len(freed) == len(made) == given.workload.model.num_layers * 2
    peaks = [max(evaluate(one, one.base_plan).peak_device_bytes) for one in (given, eager)]
    assert peaks[0] == peaks[1] + share * given.workload.model.num_layers


@pytest.mark.parametrize(
    ("rules", "said"),
    [(FULL, "whole layers recomputed"), ((BALANCED, half()), "activations on the host")],
)
def test_plans_that_no_graph_contains_are_refused(rules: tuple[Any, ...], said: str) -> None:
    given = graphed(global_batch=2)
    with pytest.raises(PlanError, match=rf"CUDA graphs of layers \(.*\) do not allow {said}"):
        lower(transfers(given.base_plan.with_rules(*rules)), given)
    assert "whole layers recomputed" in refusal(given, "full_recompute")
    assert isinstance(all_methods().resolve("keep_all").plan(given), Plan)


def test_parameters_gathered_per_layer_are_refused() -> None:
    given = graphed(system="torchtitan", dp=2, zero_stage=3, global_batch=4)
    with pytest.raises(PlanError, match="parameters gathered per layer"):
        lower(given.base_plan, given)


def test_copies_of_gradients_are_launches_of_their_own() -> None:
    copies = []
    for graphs in (True, False):
        given = graphed(graphs=graphs, global_batch=2, system_changes={"optimizer_on_host": True})
        states = given.base_plan.states
        hosted = tuple(s if s.kind == "parameter" else replace(s, home="host") for s in states)
        plan = replace(given.base_plan, states=hosted)
        copies.append(launches(given, lower(plan, given), "L")[Kind.D2H])
    assert copies[0] == copies[1] > 0


def routed(scope: str, **facts: Any) -> Problem:
    """A layer of experts over two ranks, with HybridEP and graphs of a scope."""
    stack = {"dispatcher": "hybridep", **facts}
    return graphed(model=MIXTURE, graphs=scope, ep=2, dp=2, global_batch=4, system_changes=stack)


@pytest.mark.parametrize(
    ("scope", "captured"),
    [
        ("attn", {"qkv", "attention", "proj"}),
        ("moe_router,moe_preprocess", {"router", COUNTS}),
        ("attn,moe_router,moe_preprocess", {"qkv", "attention", "proj", "router", COUNTS}),
        ("moe", {"router", COUNTS, "expert_fc1", "combine"}),
        ("mlp", set()),
    ],
)
def test_a_scope_captures_its_operators(scope: str, captured: set[str]) -> None:
    """Experts outside of a graph keep their launches and their pace; a graph has one launch."""
    given, eager = routed(scope), routed("none")
    kernels, table = given.system.kernels, given.layer(0)
    left = uncaptured(kernels, given.workload, table)
    probes = {"qkv", "attention", "proj", "router", COUNTS, "expert_fc1", "combine"}
    assert probes - left == captured
    there, here = (host_s(one, lower(one.base_plan, one)) for one in (eager, given))
    inside = {op.name for op in table.ops} - left
    passes = given.workload.model.num_layers * given.layout.num_micro_batches
    launched = sum(here.get(name, 0.0) for name in inside)
    assert launched == pytest.approx((2 if inside else 0) * passes * given.cost.host_launch_s)
    assert {name: here[name] for name in left} == {name: there[name] for name in left}
    if scope != "mlp":
        assert step_s(given) < step_s(eager)


def host_s(given: Problem, program: Program) -> dict[str, float]:
    """Seconds of rank 0's host in the kernels of layers, by operator."""
    costs, found = ActionCosts(given), dict[str, float]()
    for rank, action in timed(program):
        if rank == 0 and action.part.letter == "L" and action.kind in DIRECTION:
            found[action.op] = found.get(action.op, 0.0) + costs.issue_s(action, rank)
    return {op.name: found.get(op.name, 0.0) for op in given.layer(0).ops}


def test_an_iteration_is_one_graph_and_waits_for_no_counts() -> None:
    given = routed("full_iteration")
    program, costs = lower(given.base_plan, given), ActionCosts(given)
    issued = [(action, costs.issue_s(action, rank)) for rank, action in timed(program)]
    assert {action.kind for action, seconds in issued if seconds} == {Kind.OPTIMIZER}
    assert not any(costs.held(action) for action, _ in issued)
    assert any(ActionCosts(routed("none")).held(action) for action, _ in issued)
    at_once = remade(given, calibration=with_host(0.0))
    assert step_s(given) == pytest.approx(step_s(at_once), abs=9 * LAUNCH_S)
    full = given.base_plan.with_rules(*FULL)
    assert lower(full, given).ranks, "a graph of an iteration holds recomputed layers"
    unknown = GRAPH_BYTES[False]
    words = [fits_word(left, 2 * unknown, unknown_bytes(given)) for left in (unknown - 1, unknown)]
    assert words == ["tight", "yes"]
    assert "CUDA graphs full_iteration (4 GB or more, which no total counts)" in assumed(given)


@pytest.mark.parametrize(("scope", "facts", "said"), tables(__file__)["refused"])
def test_scopes_that_megatron_refuses(scope: str, facts: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        routed(scope, **facts)
    with pytest.raises(LayoutError, match="only supported for MoE"):
        graphed(graphs="moe", global_batch=2)


def test_who_captures_graphs() -> None:
    """Megatron-core by an option that no baseline sets, DeepSpeed not in training, and not here."""
    given = graphed(system="megatron-core", global_batch=2)
    assert "--cuda-graph-impl local" in flags_of(given, given.base_plan, "megatron_core").flags
    assert any("CUDA graphs" in x for x in flags_of(given, given.base_plan, "deepspeed").missing)
    assert "CUDA graphs" in refusals(given, given.base_plan)
    with pytest.raises(BaselineError, match="uses CUDA graphs, but baselines run without them"):
        job(given, policy("megatron_core"))
