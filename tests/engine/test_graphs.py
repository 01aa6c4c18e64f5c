"""CUDA graphs of layers: a host issues each pass of a layer at once, and the graph holds bytes."""

from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.program.program import Program
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.seconds import ActionCosts, action_seconds
from rematbench.evaluate.evaluation import evaluate
from rematbench.plan import MiniSequence, Plan, PlanError
from rematbench.problem import Problem
from rematbench.worlds.packages.flags import flags_of
from rematbench.worlds.packages.process import BaselineError, job, policy
from rematbench.worlds.records.refusals import refusals
from tests.cost_constants import ROUND
from tests.engine.test_host_clock import timed, with_host
from tests.problems import BALANCED, FULL, all_methods, half, problem, refusal, remade, transfers

LAYOUTS: list[dict[str, Any]] = [
    {"global_batch": 3},
    {"tp": 2, "cp": 2, "pp": 2, "vpp": 2, "dp": 2, "global_batch": 8},
    {"system": "megatron-kwai", "tp": 2, "pp": 4, "global_batch": 6},
]
LAUNCH_S = 1e-4


def graphed(
    launch_s: float = LAUNCH_S,
    *,
    graphs: bool = True,
    system_changes: dict[str, Any] | None = None,
    **layout: Any,
) -> Problem:
    """A problem on a stack that captures layers, with a host that takes its time."""
    given = problem(system_changes={"cuda_graphs": graphs, **(system_changes or {})}, **layout)
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
    with pytest.raises(PlanError, match=rf"CUDA graphs of layers \(.*\) with {said}"):
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


def test_who_captures_graphs() -> None:
    """Megatron-core by an option that no baseline sets, DeepSpeed not in training, and not here."""
    given = graphed(system="megatron-core", global_batch=2)
    assert "--cuda-graph-impl local" in flags_of(given, given.base_plan, "megatron_core").flags
    assert any("CUDA graphs" in x for x in flags_of(given, given.base_plan, "deepspeed").missing)
    assert "CUDA graphs" in refusals(given, given.base_plan)
    with pytest.raises(BaselineError, match="uses CUDA graphs, but baselines run without them"):
        job(given, policy("megatron_core"))
