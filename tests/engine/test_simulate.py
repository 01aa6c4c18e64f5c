"""Step times in closed form (exact in binary: unit costs), streams, events, deadlock."""

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import DeadlockError, simulate
from rematbench.plan import Offload, Pass
from tests.problems import layers, problem, rule, slots
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
