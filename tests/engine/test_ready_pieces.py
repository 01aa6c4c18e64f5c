"""Pieces that start as their gradients become ready: order, bytes, seconds, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering import lower as lowering
from rematbench.engine.lowering.lower import lower
from rematbench.engine.lowering.states.ready_pieces import ReadyPieces, ready_pieces
from rematbench.engine.program.action import (
    COMPUTE,
    HOST_UPDATE,
    STATES_DOWN,
    STATES_UP,
    WEIGHTS_UP,
    Action,
    Kind,
)
from rematbench.engine.program.ledger import live_bytes
from rematbench.engine.program.program import Block, Program
from rematbench.engine.program.storage import Role
from rematbench.evaluate.evaluation import evaluate, evaluate_program, program_bytes
from rematbench.evaluate.proof import CheckError, check
from rematbench.plan import Pieces, Plan, PlanError
from rematbench.problem import Problem
from tests.cost_constants import instant_hosts
from tests.engine.test_host_states import RATE
from tests.engine.test_state_pieces import MIXES, copied, in_pieces, sized
from tests.problems import LLAMA, on, problem, remade

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "accumulated": {"global_batch": 3},
    "zero1": {"dp": 2, "zero_stage": 1, "global_batch": 4, "system": "megatron-core"},
    "zero3": {"dp": 2, "zero_stage": 3, "global_batch": 4},
    "whole buckets": {"dp": 2, "zero_stage": 2, "global_batch": 4, "system": "deepspeed"},
    "sequence parallel": {"tp": 2, "sp": True, "dp": 2, "zero_stage": 3, "global_batch": 4},
    "one replica": {"tp": 2, "sp": True},
    "interleaved": {
        **{"pp": 2, "vpp": 2, "dp": 2, "global_batch": 8, "system": "megatron-core"},
        "model": replace(LLAMA, num_layers=8),
    },
}
EARLY = ("host", "visit", "k2", "k5", "all three")


def given(name: str, **changes: Any) -> Problem:
    found = on(problem(**{**LAYOUTS[name], **changes}), host_update_parameters_per_s=RATE)
    return remade(found, calibration=instant_hosts(found.calibration))


def both(made: Problem, mix: str, *also: str, count: int = 7) -> tuple[Plan, Plan]:
    """A plan whose pieces start as they are ready, and the plan whose pieces wait for the norm."""
    norm = sized(made, MIXES[mix], count)
    ready = replace(norm, start="ready", clip=False)
    return in_pieces(made.base_plan, ready, *also), in_pieces(made.base_plan, norm, *also)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mix", EARLY)
@pytest.mark.parametrize("also", [(), ("gradient",)])
def test_programs_are_sound_and_move_the_bytes_of_a_later_start(
    name: str, mix: str, also: tuple[str, ...]
) -> None:
    made = given(name)
    plan, norm = both(made, mix, *also)
    program, later = lower(plan, made), lower(norm, made)
    check(program)
    for kind in (Kind.D2H, Kind.H2D):
        assert copied(program, kind) == copied(later, kind)
    step = evaluate(made, plan)
    by_op = evaluate_program(made, plan, program, record=True)
    assert by_op.step_s == pytest.approx(step.step_s, rel=1e-12)
    states = [
        [(r.parameter, r.gradient, r.optimizer, r.host_state) for r in program_bytes(made, p, q)]
        for p, q in ((plan, program), (norm, later))
    ]
    assert states[0] == states[1]
    slots = max(1, MIXES[mix].slots)
    pieces = plan.state("optimizer").pieces
    assert pieces is not None
    for rank in program.ranks:
        flying, most = 0, 0
        for action, _, _ in rank.actions():
            flying += sum(alloc.nbytes for alloc in action.allocs if action.op == STATES_UP)
            flying -= sum(12 * pieces.size for each in action.frees if each.role is Role.STATES)
            most = max(most, flying)
        assert most <= slots * 12 * pieces.size
        assert list(live_bytes(rank.actions()))[-1] == (0, 0)


def test_every_unit_is_in_the_pieces_that_hold_it() -> None:
    """Two pieces for each unit or so: each names the units whose ranges it cuts."""
    made = given("one")
    plan, _ = both(made, "host", count=9)
    updates = [a for a, _, _ in lower(plan, made).ranks[0].actions() if a.stream == HOST_UPDATE]
    named = [unit for a in updates if a.op for unit in a.part.units]
    assert list(dict.fromkeys(named)) == [(part, 0) for part in ("H", "L3", "L2", "L1", "L0", "E")]
    assert all(a.part.units for a in updates if a.op)


def test_a_slow_host_starts_with_the_first_gradients() -> None:
    """The host is busy from the first piece on, so the step is shorter by most of the backward."""
    slow = on(given("one", seq_len=4096, model=replace(LLAMA, num_layers=6)), pcie_bytes_per_s=1e15)
    slow = on(slow, host_update_parameters_per_s=1e6)
    plan, norm = both(slow, "host", count=20)
    saved = evaluate(slow, norm).step_s - evaluate(slow, plan).step_s
    passes = evaluate(slow, slow.base_plan)
    assert 0.3 * passes.step_s < saved < passes.step_s


def test_gradients_of_norms_are_summed_before_their_reduction() -> None:
    """Per unit, in the last backward, and not again after the passes."""
    made = given("sequence parallel")
    plan, norm = both(made, "k2")
    kinds = []
    for one in (plan, norm):
        actions = [a for a, _, _ in lower(one, made).ranks[0].actions()]
        sums = [a for a in actions if a.op == "norm_gradients"]
        kinds.append([a.part for a in sums])
        last = max(i for i, a in enumerate(actions) if a.op == "norm_gradients")
        assert any(a.op == "gradients" and a.exchange.comm for a in actions[last:]) == (one is plan)
    assert kinds == [["H", "L3", "L2", "L1", "L0"], [""]]


def test_reloads_of_activations_do_not_wait_for_the_host() -> None:
    """No copy to the device in the backward waits for an update on the host."""
    made = given("one")
    for rank in lower(both(made, "k2")[0], made).ranks:
        for block in rank.blocks:
            if block.label == "B":
                assert not any(a.op == WEIGHTS_UP for a in block.actions)


# -- what must be found -------------------------------------------------------------------------


def without(program: Program, drop: Any) -> Program:
    """The program of one rank without some actions, whose events are recorded all the same."""
    (rank,) = program.ranks

    def left(action: Action) -> list[Action]:
        if not drop(action):
            return [action]
        ended = Action(kind=Kind.EVENT, stream=action.stream, event=action.event)
        return [ended] if action.event else []

    blocks = tuple(
        Block(b.label, tuple(x for a in b.actions for x in left(a))) for b in rank.blocks
    )
    return Program(ranks=(replace(rank, blocks=blocks),))


LEFT_OUT: dict[str, Callable[[Action, set[Any]], bool]] = {
    # what is said, by what is left out (of an action, and the ends of the copies of states down)
    "weights of P2 never return": lambda a, _: a.op == WEIGHTS_UP and a.part == "P2",
    "P1.states, which is not back": lambda a, _: a.op == STATES_DOWN and a.part == "P1",
    "sends P2 before its update": lambda a, _: a.op == "optimizer" and a.part == "P2",
    "frees P1.states while d2h may": lambda a, ends: a.stream == COMPUTE and a.wait in ends,
    "may still use": lambda a, _: a.stream == HOST_UPDATE and a.kind is Kind.WAIT,
    "may still use them": lambda a, _: a.stream == "d2h" and a.kind is Kind.WAIT,
    "(h2d|compute) may still use": lambda a, _: a.stream == "h2d" and a.kind is Kind.WAIT,
}


@pytest.mark.parametrize("start", ["ready", "norm"])
@pytest.mark.parametrize("words", LEFT_OUT)
def test_what_is_left_out_is_found(words: str, start: str) -> None:
    made = given("one")
    program = lower(both(made, "k2")[start == "norm"], made)
    check(program)
    actions = [a for a, _, _ in program.ranks[0].actions()]
    ends = {a.event for a in actions if a.op == STATES_DOWN}
    left_out = [a for a in actions if LEFT_OUT[words](a, ends)]
    assert left_out
    with pytest.raises(CheckError, match=words):
        check(without(program, lambda a: a in left_out))


def one_unit_early(chunks: Any, plan: Plan) -> ReadyPieces | None:
    """Every piece is due a unit before its gradients are ready."""
    found = ready_pieces(chunks, plan)
    if found is None:
        return None
    order = [unit.prefix for unit in reversed(chunks[0].units)]
    moved: dict[str, Any] = {}
    for unit, due in found[0].items():
        at = order[max(0, order.index(unit) - 1)]
        moved[at] = (*moved.get(at, ()), *due)
    return (moved,)


def test_a_piece_that_starts_a_unit_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = given("one")
    monkeypatch.setattr(lowering, "ready_pieces", one_unit_early)
    with pytest.raises(CheckError, match=r"before their backward|after their update|went to the"):
        check(lower(both(made, "host")[0], made))


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ({}, {"clip": True}, "nothing can be clipped by it; clip must be false"),
        ({}, {"places": ("visit",), "slots": 0}, "their visits need slots"),
        (
            {"tp": 2, "sp": True, "system": "deepspeed"},
            *({}, "system deepspeed has whole buckets; start must be norm"),
        ),
        ({"dp": 2, "global_batch": 2}, {}, "system rematbench reduces gradients after the backw"),
        (
            {"pp": 2, "dp": 2, "zero_stage": 3, "global_batch": 8, "system": "torchtitan"},
            *({}, "the pipeline sums gradients and reduces them after its last pass"),
        ),
        (
            {"pp": 2, "global_batch": 2, "model": replace(LLAMA, tied_embeddings=True)},
            *({}, "tied embeddings exchange their gradient after the backward"),
        ),
    ],
)
def test_what_cannot_start_early_is_refused_in_one_line(
    layout: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    made = on(problem(**layout), host_update_parameters_per_s=RATE)
    early = Pieces(start="ready", clip=False)
    pieces = replace(sized(made, early, 6), **changes)
    with pytest.raises(PlanError, match=words) as told:
        lower(in_pieces(made.base_plan, pieces), made)
    assert "\n" not in str(told.value)


def test_last_backwards_in_another_order_are_refused() -> None:
    made = given("interleaved")
    plan, _ = both(made, "host", "gradient")
    orders = tuple(
        tuple(item._replace(chunk=1 - item.chunk) if not item.forward else item for item in order)
        for order in lowering.rank_orders(plan, made)
    )
    with pytest.raises(PlanError, match="from the last chunk to the first"):
        lower(replace(plan, orders=orders), made)
