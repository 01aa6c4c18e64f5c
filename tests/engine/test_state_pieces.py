"""Optimizer states in pieces: bytes by direction, order, ledgers, seconds, refusals."""

from math import fsum
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.costs.states import shard
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import (
    HOST_UPDATE,
    STATES_UP,
    Kind,
)
from rematbench.engine.program.ledger import live_bytes
from rematbench.engine.program.program import Program
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.evaluation import evaluate, evaluate_program, program_bytes
from rematbench.evaluate.proof import CheckError, check
from rematbench.plan import Pieces, Plan, PlanError, StateFate
from rematbench.problem import Problem, rank_parameters
from tests.cost_constants import instant_hosts
from tests.engine.test_host_states import LAYOUTS, RATE
from tests.problems import on, problem, remade
from tests.tables import tables

MIXES: dict[str, Pieces] = {
    "host": Pieces(places=("host",)),
    "serial": Pieces(places=("host", "visit"), slots=0),
    "visit": Pieces(places=("visit",), slots=2),
    "k2": Pieces(places=("host", "visit")),
    "k5": Pieces(places=("host",) * 4 + ("visit",), slots=2),
    "all three": Pieces(places=("device", "host", "visit", "visit"), slots=3),
}


def in_pieces(plan: Plan, pieces: Pieces, *also: str) -> Plan:
    """The plan with its optimizer states in pieces, and some other kinds of states on the host."""
    kinds = ("parameter", "gradient", "optimizer")
    states = [plan.state(kind) for kind in kinds]  # type: ignore[arg-type]
    home = "device" if set(pieces.places) == {"device"} else "host"
    moved = tuple(
        replace(state, home=home, pieces=pieces)
        if state.kind == "optimizer"
        else replace(state, home="host" if state.kind in also else state.home)
        for state in states
    )
    return replace(plan, states=moved)


def timed(name: str, **changes: Any) -> Problem:
    given = on(problem(**LAYOUTS[name], **changes), host_update_parameters_per_s=RATE)
    return remade(given, calibration=instant_hosts(given.calibration))


def share_of(given: Problem, plan: Plan, rank: int = 0) -> int:
    return shard(rank_parameters(given, plan, rank), plan.state("optimizer").shards)


def sized(given: Problem, pieces: Pieces, count: int) -> Pieces:
    """The pieces with a size that cuts the smallest share into at least `count`."""
    ranks = range(given.layout.pp)
    least = min(share_of(given, given.base_plan, rank) for rank in ranks)
    return replace(pieces, size=least // count)


def copied(program: Program, kind: Kind) -> int:
    return sum(a.nbytes for rank in program.ranks for a, _, _ in rank.actions() if a.kind is kind)


CASES = [(name, mix) for name in LAYOUTS for mix in MIXES]


@pytest.mark.parametrize(("name", "mix"), CASES)
@pytest.mark.parametrize("also", [(), ("gradient",)])
def test_programs_are_sound_and_both_simulators_agree(
    name: str, mix: str, also: tuple[str, ...]
) -> None:
    given = timed(name)
    plan = in_pieces(given.base_plan, sized(given, MIXES[mix], 7), *also)
    program = lower(plan, given)
    check(program)
    by_op = evaluate_program(given, plan, program, record=True)
    assert by_op.step_s == pytest.approx(evaluate(given, plan).step_s, rel=1e-12)
    assert by_op.offload_bytes == 0  # of activations


@pytest.mark.parametrize("name", LAYOUTS)
def test_resident_pieces_are_the_program_without_pieces(name: str) -> None:
    given = timed(name)
    plan = in_pieces(given.base_plan, sized(given, Pieces(places=("device",)), 7))
    assert lower(plan, given).text() == lower(given.base_plan, given).text()
    whole, cut = evaluate(given, given.base_plan), evaluate(given, plan)
    assert (cut.step_s, cut.ranks) == (whole.step_s, whole.ranks)


@pytest.mark.parametrize("name", ["one", "accumulated", "zero3 alone"])
def test_one_serial_piece_on_the_host_is_the_home_without_pieces(name: str) -> None:
    given = timed(name)
    size = share_of(given, given.base_plan)
    plan = in_pieces(given.base_plan, Pieces(size=size, places=("host",), slots=0))
    states = tuple(replace(state, pieces=None) for state in plan.states)
    named = lower(plan, given).text().replace("P0.", "")
    assert named == lower(replace(plan, states=states), given).text()


@pytest.mark.parametrize("interleave", [2, 3, 4, 5, 10])
@pytest.mark.parametrize("also", [(), ("gradient",)])
def test_bytes_by_direction(interleave: int, also: tuple[str, ...]) -> None:
    """2 n (1 - 1/K) + 12 n/K each way, where K divides the number of pieces (Deep Optimizer States,
    Maurya et al. 2024, arXiv 2410.21316), also where a piece ends inside a unit."""
    given = timed("zero3" if also else "one", system_changes={"host_grad_bytes": 2})
    given = remade(given, layout=replace(given.layout, global_batch=given.layout.dp))
    places = ("host",) * (interleave - 1) + ("visit",)
    share = share_of(given, given.base_plan)
    pieces = Pieces(size=share // 60, places=places)
    n = share // 60 * 60
    program = lower(in_pieces(given.base_plan, pieces, *also), given)
    rest = share - n  # less than a piece, and the first place of the cycle: the host
    closed = 2 * n * (interleave - 1) // interleave + 12 * n // interleave + 2 * rest
    assert 0 <= rest < pieces.size
    assert [copied(program, kind) for kind in (Kind.D2H, Kind.H2D)] == [closed] * 2


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("also", [(), ("gradient",)])
def test_the_ledgers_count_what_stays_and_what_visits(mix: str, also: tuple[str, ...]) -> None:
    given = timed("zero3")
    pieces = sized(given, MIXES[mix], 7)
    plan = in_pieces(given.base_plan, pieces, *also)
    share = share_of(given, plan)
    counts = plan.state("optimizer").counts(share)
    assert sum(counts.values()) == share
    program = lower(plan, given)
    (rank,) = program_bytes(given, plan, program)
    assert rank.optimizer == 12 * counts["device"]
    kept = counts["device"] + counts["visit"] if also else share
    assert rank.gradient == given.system.states.grad_bytes * kept
    away = counts["host"] + counts["visit"]
    assert rank.host_state >= 12 * away
    names = [a for a, _, _ in program.ranks[0].actions() if a.op == STATES_UP]
    assert all(a.allocs[0].nbytes == a.nbytes <= 12 * pieces.size for a in names)
    after = list(live_bytes(program.ranks[0].actions()))
    last = [at for at, (a, _, _) in enumerate(program.ranks[0].actions()) if a.op == STATES_UP]
    flying = min(max(1, pieces.slots), len(last))
    most = max((after[at][0] for at in last), default=0)
    assert most == 12 * min(pieces.size * flying, counts["visit"])
    assert after[-1] == (0, 0)


def test_a_kernel_after_an_update_is_found() -> None:
    """What else is left out or moved: test_ready_pieces.py."""
    given = timed("one")
    (rank,) = lower(in_pieces(given.base_plan, sized(given, MIXES["k2"], 6)), given).ranks
    late = replace(rank, steps=(*rank.steps[:-2], rank.steps[-1], rank.steps[-2]))
    with pytest.raises(CheckError, match="after their update"):
        check(Program(ranks=(late,)))


# -- seconds ------------------------------------------------------------------------------------


def update_s(given: Problem, pieces: Pieces) -> float:
    """Seconds of a step beyond those of its passes."""
    plan = in_pieces(given.base_plan, pieces)
    actions = [a for a, _, _ in lower(given.base_plan, given).ranks[0].actions()]
    resident = fsum(action_seconds(given)(a, 0) for a in actions if a.kind is Kind.OPTIMIZER)
    return evaluate(given, plan).step_s - evaluate(given, given.base_plan).step_s + resident


def test_copies_beside_updates_are_faster_than_one_after_another() -> None:
    given = timed("one")
    for places in (("host",), ("host", "visit"), ("host", "visit", "visit")):
        serial, beside = (
            update_s(given, sized(given, Pieces(places=places, slots=slots), 12))
            for slots in (0, 2)
        )
        assert beside < serial


def test_without_slots_the_parts_add_up() -> None:
    """Updates, casts and copies of all pieces, one after another."""
    given = timed("one")
    pieces = sized(given, Pieces(places=("host", "visit"), slots=0), 6)
    plan = in_pieces(given.base_plan, pieces)
    actions = [a for a, _, _ in lower(plan, given).ranks[0].actions()]
    own = [a for a in actions if a.part.startswith("P")]
    costs = action_seconds(given, lower(plan, given))
    assert update_s(given, pieces) == pytest.approx(fsum(costs(a, 0) for a in own), rel=1e-9)
    hosted = [a for a in own if a.stream == HOST_UPDATE]
    assert {costs(a, 0) for a in hosted} == {a.nbytes / 2 / RATE for a in hosted}


def test_visits_slow_the_hosts_updates_by_their_share() -> None:
    given = timed("one")
    common = replace(given.calibration.common, host_beside_share=0.5, visit_delay_share=0.25)
    given = remade(given, calibration=replace(given.calibration, common=common))
    pieces = sized(given, MIXES["k2"], 6)
    program = lower(in_pieces(given.base_plan, pieces), given)
    costs, cost = action_seconds(given, program), given.cost
    (first, *_) = [a for a, _, _ in program.ranks[0].actions() if a.stream == HOST_UPDATE and a.op]
    count = first.nbytes // 2
    alone = count / RATE + cost.host_cast_s(count) + cost.copy_s(2 * count, "h2d")
    counts = StateFate(kind="optimizer", home="host", pieces=pieces).counts(
        share_of(given, given.base_plan)
    )
    visits = cost.copy_s(12 * counts["visit"] / counts["host"] * count, "h2d")
    assert costs(first, 0) == pytest.approx(0.5 * alone + 0.25 * visits)


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "words"), tables(__file__)["refused"])
def test_what_is_not_modelled_is_refused_in_one_line(changes: Any, words: str) -> None:
    given = timed("one")
    pieces = replace(sized(given, Pieces(), 6), **changes)
    with pytest.raises(PlanError, match=words) as told:
        lower(in_pieces(given.base_plan, pieces), given)
    assert "\n" not in str(told.value)


def test_a_home_that_contradicts_the_pieces_is_refused() -> None:
    given = timed("one")
    pieces = sized(given, Pieces(), 6)
    wrong = (StateFate(kind="optimizer", pieces=pieces),)
    with pytest.raises(PlanError, match="the optimizer's home is device, and must be host"):
        lower(replace(given.base_plan, states=wrong), given)
    wrong = (StateFate(kind="gradient", pieces=pieces),)
    with pytest.raises(PlanError, match="can be cut into pieces, not the gradient"):
        lower(replace(given.base_plan, states=wrong), given)
    wrong = (StateFate(kind="optimizer", pieces=replace(pieces, places=("device",)),
                       update="backward"),)  # fmt: skip
    with pytest.raises(PlanError, match="update once per step"):
        lower(replace(given.base_plan, states=wrong), given)
