"""One macro per block, exact in (max, +); equal to op level: tests/engine/test_engine.py."""

import random

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import STREAM_INDEX, Action
from rematbench.engine.program.storage import COPIED_IN, COPIED_OUT
from rematbench.engine.simulate.block_rows import rows_with
from rematbench.engine.simulate.macro import macro_of
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import HOST, DeadlockError, simulate, timings
from rematbench.plan import MiniSequence, Offload
from tests.problems import layers, problem, rule, slots
from tests.program_text import parse_program


def whimsical(action: Action, rank: int) -> float:
    """Any cost at all, a power of two, so that sums are exact and copies often dominate."""
    draw = random.Random(f"{action.kind} {action.part} {action.op} {rank}")
    return draw.choice([0.0, 0.125, 0.5, 1.0, 4.0])


@pytest.mark.parametrize(("pp", "m", "tied"), [(3, 1, False), (2, 2, True)])
def test_no_block_waits_for_itself(pp: int, m: int, tied: bool) -> None:
    """A forward's send leaves before its own backward's receive is waited for, though both are
    steps of one (micro-batch, chunk) and neighbours; and so with the exchange of tied ends."""
    given = problem(model=replace(layers(6), tied_embeddings=tied), pp=pp, global_batch=m)
    program = lower(given.base_plan, given)
    assert simulate_chunks(program, whimsical) == simulate(program, whimsical)


def test_a_block_is_a_max_plus_map() -> None:
    """Compute: 1 + 2 after itself, or 2 after the copy it waits for; d2h: 4 after compute's 1."""
    text = (
        "rank 0\nblock F\n"
        "F0.0 compute L0.a a=L0.x:8 e=e0 n=1\n"
        "WAIT0.0 d2h - w=e0\n"
        "D2H0.0 d2h L0.x r=L0.x a=L0.x@host:8 e=d2h n=4\n"
        "WAIT0.0 compute - w=h2d\n"
        "F0.0 compute L0.b r=L0.x n=2\n"
    )
    (block,) = parse_program(text).ranks[0].blocks
    macro = macro_of(rows_with(block, 0, timings(lambda action, rank: float(action.nbytes))))
    compute, d2h, event = STREAM_INDEX["compute"], STREAM_INDEX["d2h"], HOST + 1
    assert macro.waits == (COPIED_IN,)
    assert {target: dict(terms) for target, terms in macro.streams} == {
        compute: {compute: 3.0, event: 2.0},
        d2h: {d2h: 4.0, compute: 5.0},
    }
    assert [(name, dict(terms)) for name, terms in macro.events] == [
        (COPIED_OUT, {d2h: 4.0, compute: 5.0})
    ]


@pytest.mark.parametrize("count", [1, 16])
def test_what_is_not_asked_for_leaves_the_other_paths(count: int) -> None:
    """Of the times at entry only those that are asked for are terms, with equal constants; also
    where pieces repeat."""
    given = problem(pp=2, global_batch=4, tp=2)
    plan = given.base_plan.with_rules(rule(Offload(), "fc2_in"))
    pieces = MiniSequence(ops=("fc1", "act", "mul", "fc2"), count=count)
    plan = plan if count == 1 else replace(given.base_plan, mini_sequences=(pieces,))
    program = lower(plan, given)
    blocks = [block for rank in program.ranks for block in rank.blocks]
    assert any(block.periods for block in blocks) == (count > 1)
    asked = (STREAM_INDEX["compute"], HOST, COPIED_IN)
    for block in blocks:
        rows = rows_with(block, 0, timings(whimsical))
        whole, some = macro_of(rows), macro_of(rows, inputs=asked)
        left = {STREAM_INDEX["compute"], HOST}
        left |= {HOST + 1 + at for at, name in enumerate(whole.waits) if name is COPIED_IN}
        assert some.waits == whole.waits
        fewer = {target: dict(terms) for target, terms in some.streams}
        for target, terms in whole.streams:
            same = {target: 0.0} if target in left else {}  # of a stream that nothing moves
            assert fewer.get(target, same) == {at: value for at, value in terms if at in left}


def test_linear_in_micro_batches() -> None:
    """In the steady state one more micro-batch costs one more slot of every chunk."""
    steps = []
    for m in (8, 12, 16):
        given = problem(model=layers(8), pp=4, vpp=2, global_batch=m)
        steps.append(simulate_chunks(lower(given.base_plan, given), slots).step_s)
    assert steps[2] - steps[1] == steps[1] - steps[0] == 4 * 2 * 3


def test_a_deadlock_is_named_here_too() -> None:
    text = "rank 0\nblock B\nWAIT0.0 compute - w=recv_b\nF0.0 compute L0.a\n"
    with pytest.raises(DeadlockError, match=r"rank 0 waits for message \('b', 0, 0\)"):
        simulate_chunks(parse_program(text), slots)
