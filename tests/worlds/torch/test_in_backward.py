"""Optimizer-in-backward: each unit is updated, and its gradients freed, inside the backward."""

import dataclasses

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.plan import Plan, StateFate
from rematbench.workload import Model, Precision
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.rank_model import NotExecutable, require_executable
from rematbench.worlds.torch.rank_processes import execute_cases
from rematbench.worlds.torch.single_rank import trace_rank
from tests.problems import plan_of
from tests.tables import tables
from tests.worlds.torch import cases, grid, laws
from tests.worlds.torch.laws import run_here
from tests.worlds.torch.test_faults import edited

ONCE = tables(__file__)["once"]
"""One micro-batch a step: gradients of several would have to be kept between them."""


def beside(plan: Plan) -> Plan:
    """The plan, updating in the backward."""
    kept = tuple(state for state in plan.states if state.kind != "optimizer")
    fate: StateFate = replace(plan.state("optimizer"), update="backward")
    return replace(plan, states=(*kept, fate))


def case(
    layout: str, plan: str, precision: Precision = "fp32", model: Model | None = None
) -> tuple[Case, Case]:
    """A raw plan as it is, and with its update in the backward; both on the same batches."""
    among = cases.EXPERT_LAYOUTS if layout in cases.EXPERT_LAYOUTS else cases.LAYOUTS
    names = f"once-{layout}"
    among[names] = among[layout] | ONCE[layout]
    whole = cases.case(names, plan, precision=precision, model=model)
    name = f"{whole.name} beside"
    return whole, dataclasses.replace(whole, name=name, plan=beside(whole.plan))


@pytest.mark.parametrize("plan", ["keep", "full", "offload", "mini"])
def test_the_same_bits_as_an_update_at_the_end(plan: str) -> None:
    whole, given = case("one", plan)
    a, b = run_here(whole), run_here(given)
    assert laws.same_bits(a, b)
    assert laws.bytes_differ(given, b) == []
    grid.check_gradients(given, b)


def test_gradients_live_only_until_their_update() -> None:
    whole, given = case("one", "keep")
    a, b = run_here(whole).ranks[0], run_here(given).ranks[0]
    total = sum(
        shard.values.numel() for shard in b.gradients[0].values() if shard.values is not None
    )
    assert a.state_bytes - b.state_bytes == 4 * total
    assert a.peak_bytes < b.peak_bytes < a.peak_bytes + 4 * total


@pytest.mark.parametrize("plan", ["keep", "offload", "mini"])
def test_the_gradient_of_a_tied_embedding_lives_from_the_head_on(plan: str) -> None:
    whole, given = case("one", plan, model=replace(cases.TINY, tied_embeddings=True))
    a, b = run_here(whole), run_here(given)
    assert laws.same_bits(a, b)
    assert laws.bytes_differ(given, b) == []
    rooms = [
        (action.part, str(action.allocs[0].storage))
        for action, _, _ in lower(given.plan, given.problem).ranks[0].actions()
        if action.kind is Kind.ALLOC and action.op == "gradients"
    ]
    assert rooms[:2] == [("H", "H.gradients"), ("E", "E.gradients")]
    assert len(rooms) == len({part for part, _ in rooms})


@pytest.mark.full
def test_sharded_staged_and_split() -> None:
    layouts = ("dp2", "pp2", "tp2", "ep2", "tp2-etp1")
    pairs = [case(layout, plan) for layout in layouts for plan in ("keep", "full")]
    found = iter(execute_cases([part for pair in pairs for part in pair], timeout_s=120.0))
    for _, changed in pairs:
        a, b = next(found), next(found)
        assert (a.status, b.status) == ("ok", "ok"), (a.reason, b.reason)
        assert laws.same_bits(a, b)
        assert laws.bytes_differ(changed, b) == []


def test_bf16_sums_in_fp32() -> None:
    whole, given = case("one", "keep", "bf16")
    assert laws.same_bits(run_here(whole), run_here(given))


def test_traced_as_executed() -> None:
    _, given = case("one", "full")
    assert trace_rank(given.problem, given.plan).bytes_after == run_here(given).ranks[0].bytes_after


def test_mst_with_its_update_in_the_backward() -> None:
    _, given = case("one", "keep")
    own = dataclasses.replace(given, plan=plan_of(given.problem, "mst", optimizer_in_backward=True))
    result = run_here(own)
    assert laws.bytes_differ(own, result) == []
    grid.check_gradients(own, result)


def test_a_unit_that_is_never_updated_is_found() -> None:
    def skip(action: Action) -> list[Action]:
        return [] if action.kind is Kind.OPTIMIZER and action.part == "L1" else [action]

    _, given = case("one", "keep")
    given = dataclasses.replace(given, shards=False, gradients=False)
    whole, broken = run_here(given), run_here(edited(given, skip))
    assert whole.losses[0] == broken.losses[0]
    assert whole.losses[1] != broken.losses[1]


def test_what_it_cannot_have_is_refused_by_name() -> None:
    given = cases.tiny("one", precision="fp64")
    with pytest.raises(NotExecutable, match="gradients of 4 bytes, not 8"):
        require_executable(given, beside(given.base_plan))
