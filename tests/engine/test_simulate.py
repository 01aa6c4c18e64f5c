"""Step times in closed form (exact in binary: unit costs), streams, events, deadlock."""

import random
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.blocks.fates import ChunkPlace, covered
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import STREAM_INDEX, Action, Kind
from rematbench.engine.program.storage import COPIED_IN, COPIED_OUT
from rematbench.engine.simulate.block_rows import rows_with
from rematbench.engine.simulate.macro import macro_of
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import (
    HOST,
    DeadlockError,
    RankedSeconds,
    simulate,
    timings,
)
from rematbench.engine.simulate.seconds import ActionCosts
from rematbench.evaluate.breakdown import WithoutTraffic
from rematbench.plan import Keep, MiniSequence, Offload, Pass, Rule, Select
from tests.problems import BALANCED, half, layers, on, problem, rule, slots, transfers
from tests.program_text import parse_program


def unit(action: Action, rank: int) -> float:
    """Every action takes one second."""
    return 1.0


@pytest.mark.parametrize(
    ("pp", "vpp", "m"), [(2, 2, 2), (2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 2, 9), (8, 5, 16)]
)
def test_interleaved_step_is_m_v_plus_p_minus_1_slots(pp: int, vpp: int, m: int) -> None:
    given = problem(model=layers(pp * vpp), pp=pp, vpp=vpp, global_batch=m)
    program = lower(given.base_plan, given)
    assert simulate(program, slots).step_s == 3 * (m * vpp + pp - 1)
    assert simulate_chunks(program, slots).step_s == 3 * (m * vpp + pp - 1)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 1), (4, 2), (4, 9)])
def test_1f1b_and_gpipe_steps_are_m_plus_p_minus_1_slots(schedule: str, pp: int, m: int) -> None:
    given = problem(model=layers(pp), pp=pp, global_batch=m)
    program = lower(replace(given.base_plan, schedule=schedule), given)
    simulation = simulate(program, slots)
    assert simulation.step_s == 3 * (m + pp - 1)
    assert [simulation.busy_s(rank, "compute") for rank in range(pp)] == [3 * m] * pp


def test_the_slowest_stage_sets_the_pace() -> None:
    """1F1B on (3, 1) layers: rank 1's forward and backward fit beside rank 0's next forward."""
    given = problem(model=layers(4), pp=2, global_batch=4)
    plan = replace(given.base_plan, partition=(((0, 1, 2),), ((3,),)))
    simulation = simulate(lower(plan, given), slots)
    assert simulation.step_s == simulation.busy_s(0, "compute") == 4 * 3 * 3


def test_a_send_takes_its_time_beside_compute() -> None:
    """One micro-batch, two stages, both transfers exposed."""
    given = problem(model=layers(2), pp=2, global_batch=1)
    program = lower(given.base_plan, given)

    def seconds(action: Action, rank: int) -> float:
        return 0.5 if action.kind is Kind.SEND else slots(action, rank)

    assert simulate(program, seconds).step_s == 1 + 0.5 + 3 + 0.5 + 2


@pytest.mark.parametrize("copy_s", [0.25, 1.0, 1.5, 2.0, 4.0])
def test_copies_hide_until_they_are_longer_than_compute(copy_s: float) -> None:
    """GPipe: D2H of k beside forward k + 1, H2D of k + 1 beside backward k; one tensor leaves."""
    given, m = problem(model=layers(1), global_batch=4), 4
    plan = replace(given.base_plan, schedule="gpipe").with_rules(rule(Offload(), "attn_out"))

    def seconds(action: Action, rank: int) -> float:
        return copy_s if action.kind in (Kind.D2H, Kind.H2D) else slots(action, rank)

    step_s = 1 + (m - 1) * max(1, copy_s) + (m - 1) * max(2, copy_s) + 2
    assert simulate(lower(plan, given), seconds).step_s == step_s


HAND_MADE = """rank 0
block F
F0.0 compute L0.a a=L0.x:8 e=f_end
block D2H
WAIT0.0 d2h - w=f_end
D2H0.0 d2h L0.x r=L0.x a=L0.x@host:8 e=d2h n=8
block F
F1.0 compute L0.a a=L0.x:8 e=f_end
block free
WAIT0.0 compute - w=d2h
FREE0.0 compute - f=L0.x
"""


def test_literal_timeline() -> None:
    """Streams are queues; a WAIT holds its own stream only."""
    simulation = simulate(parse_program(HAND_MADE), unit, record=True)
    got = [
        f"{i.start_s:g}-{i.end_s:g} {i.stream} {i.action.kind.value}{i.micro_batch}.{i.chunk}"
        for i in simulation.intervals
    ]
    assert got == ["0-1 compute F0.0", "1-2 d2h D2H0.0", "1-2 compute F1.0", "2-2 compute FREE0.0"]
    assert simulation.step_s == 2.0
    assert simulation.busy_s(0, "compute") == 2.0
    assert simulation.busy_s(0, "d2h") == 1.0


def test_ranks_that_wait_for_each_other_are_a_deadlock_by_name() -> None:
    given = problem(model=layers(2), pp=2, global_batch=2)
    backward_first = (Pass(False, 0, 0), Pass(True, 0, 0), Pass(True, 1, 0), Pass(False, 1, 0))
    good = (Pass(True, 0, 0), Pass(False, 0, 0), Pass(True, 1, 0), Pass(False, 1, 0))
    program = lower(replace(given.base_plan, orders=(backward_first, good)), given)
    message = r"rank 0 waits for message \('b', 0, 0\); rank 1 waits for message \('f', 0, 1\)"
    for simulator in (simulate, simulate_chunks):
        with pytest.raises(DeadlockError, match=message):
            simulator(program, unit)


# -- ranks that are alike share compiled blocks: no second may change by it ------------------------


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 4, "global_batch": 4},
    {"pp": 4, "cp": 2, "dp": 2, "global_batch": 8},
    {"system": "megatron-kwai", "tp": 2, "sp": False, "pp": 4, "dp": 3, "global_batch": 12},
]


class Apart(WithoutTraffic):
    """The costs of a host that takes its time, with no two ranks alike."""

    def __init__(self, costs: ActionCosts) -> None:
        super().__init__(costs, frozenset())
        self.timing = costs.timing  # type: ignore[method-assign]

    def alike(self, rank: int) -> int:
        """Only the rank itself."""
        return rank


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_action_takes_equally_long_on_ranks_that_are_alike(
    layout: dict[str, Any], gpus: int
) -> None:
    given = on(problem(**layout), gpus_per_node=gpus)
    costs = ActionCosts(given)
    assert isinstance(costs, RankedSeconds)
    program = lower(transfers(given.base_plan.with_rules(BALANCED, half())), given)
    first: dict[Any, int] = {}
    for rank in program.ranks:
        like = first.setdefault(costs.alike(rank.rank), rank.rank)
        for block in rank.blocks:
            for action in block.actions:
                if action.kind.name not in ("FREE", "ALLOC", "RECV", "WAIT", "EVENT"):
                    assert costs(action, rank.rank) == costs(action, like)
                    assert costs.issue_s(action, rank.rank) == costs.issue_s(action, like)
    for run in (simulate, simulate_chunks):
        assert run(program, costs) == run(program, Apart(costs))


def test_links_that_differ_are_told_apart() -> None:
    """Two stages on a node: every other send leaves it."""
    costs = ActionCosts(on(problem(**LAYOUTS[0]), gpus_per_node=4))
    assert [costs.alike(0) == costs.alike(rank) for rank in range(4)] == [True, False, True, False]


def test_what_rules_cover_of_a_chunk() -> None:
    where = ChunkPlace(stage=1, chunk=0, layers=(6, 7))
    selects = [Select(), Select(stages=(0,)), Select(layers=(7, 8)), Select(chunks=(1,))]
    rules = [Rule(select, Keep()) for select in selects]
    assert covered(rules, where) == ((-1,), None, (1,), None)


# -- one macro per block, exact in (max, +); equal to op level: tests/engine/test_engine.py --------


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
