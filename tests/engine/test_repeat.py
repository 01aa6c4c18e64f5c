"""The block of a long chunk of equal layers is what its emitters write layer by layer."""

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.engine.lowering import repeated_layers
from rematbench.engine.lowering.blocks import pieces
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import pool_bytes
from rematbench.engine.program.profile import program_profiles
from rematbench.engine.program.program import Block, Program
from rematbench.engine.program.replay import replay
from rematbench.engine.simulate.block_rows import Row, RowBlock, RowPart
from rematbench.engine.simulate.macro import macro_of
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.plan import MiniSequence, Plan, PlanError, Recompute, Rule, Select
from rematbench.problem import Problem
from tests.problems import BALANCED, FULL, SKELETAL, half, layers, problem, transfers
from tests.strategies import cases

DEEP = settings(max_examples=settings.default.max_examples * 2 // 5)


def unrepeated(plan: Plan, given: Problem) -> Program:
    """The program without repetition."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated_layers, "short_chunk", lambda *_: None)
        return lower(plan, given)


def actions_of(block: Block) -> int:
    return sum(times for _, times in block.counted())


def same_bytes(program: Program, whole: Program) -> None:
    """Periods that are not written out count as many actions and bytes as all of their turns."""
    actions = sum(actions_of(block) for block, _ in program.block_runs)
    assert program.written <= actions == whole.written
    assert program_profiles(program) == program_profiles(whole)
    for rank, other in zip(program.ranks, whole.ranks, strict=True):
        assert replay(rank, (), None) == replay(other, (), None)
        assert pool_bytes(rank) == pool_bytes(other)


@DEEP
@given(cases(deeper=24))
def test_repeated_turns_are_the_whole_chunk(case: tuple[Problem, Plan]) -> None:
    """In text and in bytes: the ledger and the allocator read one period and its names."""
    given_problem, plan = case
    try:
        whole = unrepeated(plan, given_problem)
    except PlanError as error:
        with pytest.raises(PlanError, match=str(error)[:20]):
            lower(plan, given_problem)
        return
    program = lower(plan, given_problem)
    assert program.text() == whole.text()
    same_bytes(program, whole)


MLP, HEAD = ("mlp_norm", "fc1", "act", "mul", "fc2"), ("lm_head", "loss")


def in_pieces(plan: Plan, mlp: int, head: int) -> Plan:
    """The plan with its MLPs and its head in pieces."""
    return replace(plan, mini_sequences=(MiniSequence(MLP, mlp), MiniSequence(HEAD, head)))


def one_by_one(plan: Plan, given: Problem) -> Program:
    """The program with every piece written by the emitters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MIN_SPARED", 1 << 20)
        return lower(plan, given)


def written_out(plan: Plan, given: Problem) -> Program:
    """The program with every layer and every piece written by the emitters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated_layers, "short_chunk", lambda *_: None)
        return one_by_one(plan, given)


@DEEP
@given(cases(deeper=24), st.integers(2, 32), st.integers(2, 32), st.booleans())
def test_many_pieces_are_those_written_one_by_one(
    case: tuple[Problem, Plan], mlp: int, head: int, plain: bool
) -> None:
    """Periods of pieces, alone and inside periods of layers: as text, in bytes and in seconds."""
    given_problem, plan = case
    plan = in_pieces(replace(plan, rules=FULL) if plain else plan, mlp, head)
    try:
        whole = written_out(plan, given_problem)
    except PlanError as error:
        with pytest.raises(PlanError, match=re.escape(str(error)[:20])):
            lower(plan, given_problem)
        return
    program = lower(plan, given_problem)
    assert program.text() == whole.text()
    same_bytes(program, whole)
    seconds = action_seconds(given_problem)
    found, expected = simulate_chunks(program, seconds), simulate(whole, seconds)
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-9)


AGAIN = Rule(Select(parts=("layer",), activations=("mlp_norm_out", "fc2_in")), Recompute("layer"))


@pytest.mark.parametrize("refused", [0, 1])
def test_pieces_are_written_after_others_were_repeated(
    monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """Where every second repetition is refused, emitters know the tensors of repeated pieces."""
    given_problem = problem(**LAYOUTS["tp"])
    plan = in_pieces(given_problem.base_plan.with_rules(AGAIN), 16, 16)
    expected, calls, once = one_by_one(plan, given_problem).text(), [], pieces._rows_of_piece

    def some(*words: Any) -> list[bool] | None:
        calls.append(words)
        return None if len(calls) % 2 == refused else once(*words)

    monkeypatch.setattr(pieces, "_rows_of_piece", some)
    assert lower(plan, given_problem).text() == expected


@pytest.mark.parametrize("layout", ["one", "tp"])
def test_actions_are_counted_once_for_all_periods(layout: str) -> None:
    """Counts stand for every action of every rank: kernels, bytes of copies and collectives."""
    rules, moves = PLANS["half by layer"]
    given_problem = problem(model=layers(60), **LAYOUTS[layout])
    program = lower(transfers(given_problem.base_plan.with_rules(*rules), **moves), given_problem)
    expected = Counter(
        (a.kind, a.op, a.nbytes, a.exchange.comm)
        for rank in program.ranks
        for a, _, _ in rank.actions()
    )
    found: Counter[object] = Counter()
    for block, runs in program.block_runs:
        for a, count in block.counted():
            found[a.kind, a.op, a.nbytes, a.exchange.comm] += count * runs
    assert found.total() == expected.total()
    plain = {key: n for key, n in expected.items() if not key[1].startswith(("L", "d:"))}
    assert len(plain) > 20
    assert all(found[key] == n for key, n in plain.items())


EVENTS = ("e0", "e1", "e2")
ROWS = st.lists(
    st.builds(
        Row,
        stream=st.integers(0, 2),
        seconds=st.integers(0, 9).map(float),
        issue=st.sampled_from([0.0, 1.0]),
        late=st.sampled_from([0.0, 2.0]),
        held=st.booleans(),
        wait=st.sampled_from(["", *EVENTS, "before"]),
        begin=st.just(""),
        event=st.sampled_from(["", *EVENTS, "F"]),
        send=st.just(""),
    ),
    min_size=1,
    max_size=6,
).map(tuple)


@given(ROWS, st.lists(st.sampled_from(EVENTS), min_size=1, max_size=3), st.integers(2, 20))
def test_a_power_is_turn_after_turn(rows: tuple[Row, ...], before: list[str], times: int) -> None:
    """The (max, +) power of a turn gives what turns one by one give, also of events that a turn
    knows from the one before by another name."""
    carried = tuple(zip(("e7", "e8", "e9"), before, strict=False))
    last = Row(0, 1.0, 0.0, 0.0, False, carried[0][0], "", "F", "")
    head = RowPart(tuple(Row(i, 1.0, 0.0, 0.0, False, "", "", e, "") for i, e in enumerate(EVENTS)))
    turn = RowPart((*rows, last), carried, times)
    shown = []
    for parts in ([turn], [turn._replace(times=1)] * times):
        made = macro_of(RowBlock((head, RowPart(turn.rows), *parts), (), ("F", *EVENTS), ()))
        ends = {name: dict(terms) for name, terms in (*made.streams, *made.events)}
        shown.append((ends, made.waits))
    assert shown[0] == shown[1]


PLANS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "keep": ((), {}),
    "balanced": ((BALANCED,), {}),
    "full": (FULL, {}),
    "skeletal": (SKELETAL, {"granularity": "layer", "reload_slots": 2}),
    "half by layer": ((half(1.0),), {"granularity": "layer", "release_lag": 2}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"global_batch": 2},
    "tp": {"tp": 2, "sp": True, "pp": 2, "global_batch": 4},
    "zero 3": {"dp": 2, "zero_stage": 3, "global_batch": 4},
}


@pytest.mark.parametrize(
    ("name", "layout", "mlp", "head"),
    [
        *((name, "tp", 1, 1) for name in PLANS),
        *(("half by layer", layout, 1, 1) for layout in ("one", "zero 3")),
        *((name, layout, 16, 16) for name, layout in zip(PLANS, LAYOUTS, strict=False)),
        ("skeletal", "zero 3", 1, 16),  # what is copied is in no pieces
    ],
)
def test_both_passes_repeat_and_take_as_long(name: str, layout: str, mlp: int, head: int) -> None:
    """Layers, pieces inside each layer, and pieces in the head."""
    rules, moves = PLANS[name]
    given_problem = problem(model=layers(60), **LAYOUTS[layout])
    plan = transfers(given_problem.base_plan.with_rules(*rules), **moves)
    plan = in_pieces(plan, mlp, head)
    program, whole = lower(plan, given_problem), written_out(plan, given_problem)
    assert program.text() == whole.text()
    passes = [b for rank in program.ranks for b in rank.blocks if b.label in "FB"]
    assert all(block.periods and len(block.written) < actions_of(block) for block in passes)
    assert all(any(p.inside for p in block.periods) == (mlp > 1) for block in passes)
    assert all(actions_of(block) == len(block.actions) for block in passes)
    same_bytes(program, whole)
    seconds = action_seconds(given_problem)
    found, expected = simulate_chunks(program, seconds), simulate(whole, seconds)
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-9)
    for busy, other in zip(found.stream_busy_s, expected.stream_busy_s, strict=True):
        assert busy == pytest.approx(other, rel=1e-9)
