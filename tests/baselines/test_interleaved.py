"""Messages of Megatron-core's interleaved schedule: what a rank holds, and for how long."""

from collections import Counter

import pytest

from baselines.megatron_core.interleaved import INPUT, RECEIVED, Step, with_messages
from rematbench.lowering.lower import lower
from rematbench.packages.process import policy
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.program.action import Kind
from tests.baselines.cases import TINY, Asked, asked_problem

OUTPUT, GRADIENT = "L1.layer_input", "d:L1.layer_input"
MESSAGES = (INPUT, RECEIVED, OUTPUT, GRADIENT)


def rewritten(layout: str, stage: int, *, moved: bool = False) -> tuple[Problem, list[Step]]:
    """A stage's steps with its messages; one layer a chunk."""
    problem = asked_problem(Asked(layout, model=TINY))
    plan = policy("megatron_core").plan(problem)
    assert isinstance(plan, Plan)
    rank = lower(plan, problem).ranks[stage]
    steps = [(rank.blocks[s.block].actions, (s.micro_batch, s.chunk)) for s in rank.steps]
    return problem, with_messages(steps, problem, stage, moved=moved)


def forwards_and_backwards(steps: list[Step]) -> list[tuple[str, int, int]]:
    found = []
    for actions, where in steps:
        kinds = {action.kind for action in actions}
        if kinds & {Kind.FORWARD, Kind.BACKWARD_INPUT}:
            found.append(("B" if Kind.BACKWARD_INPUT in kinds else "F", *where))
    return found


@pytest.mark.parametrize("layout", ["pp2-vpp2", "pp2-vpp2-one-group"])
@pytest.mark.parametrize("stage", [0, 1])
def test_every_message_is_made_and_freed_once(layout: str, stage: int) -> None:
    """And no pass is lost: what the plan of the schedule runs is run in its order."""
    problem, steps = rewritten(layout, stage)
    made: Counter[tuple[tuple[int, int], str]] = Counter()
    freed = made.copy()
    for actions, where in steps:
        for action in actions:
            made.update((where, alloc.name) for alloc in action.allocs if alloc.name in MESSAGES)
            freed.update((where, name) for name in action.frees if name in MESSAGES)
    assert made == freed
    assert set(made.values()) == {1}
    count = problem.layout.num_micro_batches
    assert sum(name == INPUT for _, name in made) == 2 * count
    assert sum(name == RECEIVED for _, name in made) == (2 - stage) * count
    assert len(forwards_and_backwards(steps)) == 4 * count


def test_an_output_waits_for_the_exchange_after_the_backward() -> None:
    """In the steady state a forward's output is there during the backward of its iteration; in the
    warm-up it goes when the next input has come."""
    _, steps = rewritten("pp2-vpp2", 0)
    at = {
        (where, name): number
        for number, (actions, where) in enumerate(steps)
        for action in actions
        for name in action.frees
        if name == OUTPUT
    }
    ran = {name: i for i, name in enumerate(forwards_and_backwards(steps))}
    place = [i for i, step in enumerate(steps) if forwards_and_backwards([step])]
    assert at[(0, 0), OUTPUT] < place[ran["F", 1, 0]]
    assert place[ran["B", 0, 1]] < at[(2, 0), OUTPUT] < place[ran["F", 3, 0]]


def test_a_decoder_holds_its_last_input_and_that_its_gradient() -> None:
    """Until the chunk's next forward, or to the end: set_input_tensor, and the input's `.grad`."""
    _, steps = rewritten("pp2-vpp2", 1)
    last = max(i for i, step in enumerate(steps) if forwards_and_backwards([step]))
    late = {
        (where, name)
        for actions, where in steps[last:]
        for action in actions
        for name in action.frees
        if action.kind == Kind.FREE and name in (INPUT, GRADIENT)
    }
    assert {((3, chunk), name) for chunk in (0, 1) for name in (INPUT, GRADIENT)} <= late


def test_inputs_that_are_offloaded_are_freed_by_their_plan_but_for_those_that_stay() -> None:
    """With one layer a chunk the last stage's last chunk keeps its inputs (offloads)."""
    _, steps = rewritten("pp2-vpp2", 1, moved=True)
    own = {where for actions, where in steps if len(actions) == 1 and INPUT in actions[0].frees}
    assert own == {(micro_batch, 1) for micro_batch in range(4)}
