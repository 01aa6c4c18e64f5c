"""Weight gradients in passes of their own: closed forms of the zero-bubble schedules."""

import json
from itertools import accumulate

import msgspec
import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.lowering.schedule import passes
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.profile import program_profiles
from rematbench.engine.program.program import Program
from rematbench.engine.simulate.op_level import simulate
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import CheckError, check
from rematbench.plan import Pass, Plan, PlanError, Schedule, Shape
from rematbench.problem import Problem, rank_parameters
from rematbench.solve.orders import grouped_orders
from tests.engine.test_engine import held_to_the_ledger
from tests.engine.twin.interpreter import interpret
from tests.problems import BALANCED, FULL, GPT, LLAMA, half, layers, problem, transfers
from tests.tables import tables
from tests.worlds.torch.cases import mini

COSTS = [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 2.5, 1.5)]
"""Seconds of a forward, of a backward's two halves: F >= W."""


def pipeline(pp: int, m: int, schedule: Schedule) -> tuple[Problem, Plan]:
    given = problem(model=layers(2 * pp), pp=pp, global_batch=m)
    return given, replace(given.base_plan, schedule=schedule)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 9)])
@pytest.mark.parametrize(("schedule", "step"), [("zb-h1", 1), ("zb-h2", 2)])
def test_the_first_rank_waits_for_what_the_paper_says(
    schedule: Schedule, step: int, pp: int, m: int, costs: tuple[float, float, float]
) -> None:
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    seconds = dict(zip(kinds, costs, strict=True))

    def one_kernel(action: Action, rank: int) -> float:
        return seconds[action.kind] if (action.part, action.op) == ("L0", "fc2") else 0.0

    given, plan = pipeline(pp, m, schedule)
    found = simulate(lower(plan, given), one_kernel)
    f, b, w = costs
    work = m * sum(costs)
    assert found.rank_end_s[0] - work == pytest.approx((pp - 1) * (f + b - step * w))
    assert found.rank_end_s[-1] - work == pytest.approx((pp - 1) * f)
    usual = simulate(lower(given.base_plan, given), one_kernel)
    assert usual.step_s - work == pytest.approx((pp - 1) * sum(costs))


@pytest.mark.parametrize(("pp", "m"), [(2, 3), (4, 8), (4, 3), (8, 16)])
def test_micro_batches_between_forward_and_weight_gradients(pp: int, m: int) -> None:
    for schedule, most in (("zb-h1", pp), ("zb-h2", 2 * pp - 1)):
        for rank in range(pp):
            live = peak = 0
            order = passes(schedule, rank, pp, 1, m)  # type: ignore[arg-type]
            assert sorted(order, key=str) == sorted(
                (Pass(kind, i, 0) for kind in (True, "B", "W") for i in range(m)), key=str
            )
            for item in order:
                live += item.forward - item.last
                peak = max(peak, live)
            assert peak == min(most, m)


SHAPES = [("zb-v", 4), ("v-half", 4), ("v-min", 4), ("zb-v", 8), ("v-half", 8), ("v-min", 8)]


@pytest.mark.parametrize(("shape", "pp"), SHAPES)
def test_chunks_that_turn_keep_and_wait_for_what_the_paper_says(shape: Shape, pp: int) -> None:
    """Micro-batches that every rank keeps, and the wait in passes of equal seconds: with the shift
    of pp - 1 forwards between the ranks, V-Half has half of 1F1B's, V-Min two thirds and a bit."""
    m = 2 * pp
    given = problem(model=layers(2 * pp), pp=pp, vpp=2, global_batch=m)
    plan = given.base_plan.turned(shape)
    most = {"zb-v": pp, "v-half": (pp + 2) / 2, "v-min": (pp + 4) // 3}[shape]
    orders = [passes(shape, rank, pp, 2, m) for rank in range(pp)]
    live = [list(accumulate(item.forward - item.last for item in order)) for order in orders]
    assert max(map(max, live)) == 2 * most
    assert [len(set(order)) for order in orders] == [6 * m] * pp
    assert not any(each[-1] for each in live)
    program = lower(plan, given)
    check(program)
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    found = simulate(program, lambda action, _: float(action.op == "fc2" and action.kind in kinds))
    wait = {"zb-v": pp - 1, "v-half": 3 * (pp - 1), "v-min": 4 * pp - 5}[shape]
    assert found.step_s - 6 * m == wait


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"dp": 2}])
def test_chunks_that_turn_are_sound_and_both_ends_are_on_the_first_rank(
    layout: dict[str, int],
) -> None:
    given = problem(model=layers(8), pp=2, vpp=2, zero_stage=1, global_batch=8, **layout)
    plan = given.base_plan.turned("v-half")
    programs = [lower(each, given) for each in (plan, plan.with_rules(*FULL))]
    gradients = []
    for program in programs:
        check(program)
        gradients.append([rank.gradients for rank in held_to_the_ledger(program)])
    assert gradients[0] == gradients[1]
    base, split = ([rank_parameters(given, p, r) for r in (0, 1)] for p in (given.base_plan, plan))
    assert sum(base) == sum(split)
    assert split[1] == 4 * given.layer(0).parameters


def lowered(schedule: Schedule, **layout: int) -> tuple[Problem, Program]:
    given = problem(model=layers(4), pp=2, global_batch=4, **layout)
    return given, lower(replace(given.base_plan, schedule=schedule), given)


def test_bytes_between_the_halves_are_inputs_and_gradients_of_linears() -> None:
    """Of each linear its input and its output's gradient, as in the paper's repository."""
    given, program = lowered("zb-h1")
    table = given.layer(0)
    linears = [op for op in table.ops if op.backward_weight]
    held = {name for op in linears for name in (*op.saves, *op.outputs)}
    nbytes = 2 * sum(table.activations[name].nbytes for name in held)  # of two layers
    net = dict.fromkeys("FBW", 0)
    for block, profile in zip(program.ranks[0].blocks, program_profiles(program)[0], strict=True):
        net[block.label] = net.get(block.label, 0) + profile.device_net
    assert -net["W"] == nbytes


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "sp": False}, {"dp": 2}])
@pytest.mark.parametrize(
    ("schedule", "model"), [("zb-h2", LLAMA), pytest.param("zb-h1", GPT, marks=pytest.mark.full)]
)
def test_programs_are_sound_and_real_bytes_are_the_ledger_s(
    schedule: Schedule, model: object, layout: dict[str, int]
) -> None:
    given = problem(
        model=replace(model, num_layers=6),  # type: ignore[type-var]
        pp=2, zero_stage=1, global_batch=8, **layout,
    )  # fmt: skip
    keep = replace(given.base_plan, schedule=schedule)
    gradients = [rank.gradients for rank in interpret(lower(keep, given))]
    plans = {
        "full": keep.with_rules(*FULL),
        "balanced": keep.with_rules(BALANCED),
        "slots": transfers(keep.with_rules(half()), reload_slots=2, release_lag=2),
        "mini": mini(keep),
    }
    for name, plan in plans.items():
        program = lower(plan, given)
        check(program)
        ranks = held_to_the_ledger(program)
        if name != "mini":
            assert [rank.gradients for rank in ranks] == gradients


def test_a_gradient_that_is_freed_before_its_weight_s_is_found() -> None:
    _, program = lowered("zb-h1")
    rank = program.ranks[0]
    at, block = next((i, b) for i, b in enumerate(rank.blocks) if b.label == "B")
    wrong = replace(block, written=(*block.written, next(
        replace(a, frees=a.frees[:1])
        for b in rank.blocks if b.label == "W" for a in b.actions if a.frees
    )))  # fmt: skip
    blocks = (*rank.blocks[:at], wrong, *rank.blocks[at + 1 :])
    with pytest.raises(CheckError, match="is not allocated"):
        check(Program(ranks=(replace(rank, blocks=blocks), *program.ranks[1:])))


@pytest.mark.parametrize(("pp", "vpp", "group"), [(4, 2, 4), (4, 2, 2), (4, 3, 2), (2, 2, 1)])
def test_smaller_groups_keep_fewer_chunks_and_wait_longer(pp: int, vpp: int, group: int) -> None:
    """Generalised interleaving: chunks in flight, and the bubble in passes of equal seconds."""
    m = 4 * pp
    given = problem(model=layers(pp * vpp), pp=pp, vpp=vpp, global_batch=m)
    orders = grouped_orders(given, group)
    for rank, order in enumerate(orders):
        live = [0, *accumulate(item.forward - item.last for item in order)]
        assert max(live) == group * (vpp - 1) + pp - rank
    program = lower(replace(given.base_plan, orders=orders), given)
    check(program)
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    found = simulate(program, lambda action, _: float(action.op == "fc2" and action.kind in kinds))
    assert found.step_s - 3 * m * vpp == 2 * (pp - 1) + (pp - group) * (vpp - 1)


def test_orders_are_written_as_they_were() -> None:
    """Committed plans say a pass as [forward, micro-batch, chunk]; halves have a word."""
    given, plan = pipeline(2, 2, "1f1b")
    orders = tuple(passes("zb-h1", rank, 2, 1, 2) for rank in (0, 1))
    made = replace(plan, orders=orders)
    text = msgspec.json.encode(made)
    assert json.loads(text)["orders"][0][:3] == [[True, 0, 0], [True, 1, 0], ["B", 0, 0]]
    assert msgspec.json.decode(text, type=Plan) == made
    old = b'{"partition":[],"orders":[[[true,0,0],[false,0,0]]]}'
    assert msgspec.json.decode(old, type=Plan).orders == ((Pass(True, 0, 0), Pass(False, 0, 0)),)
    same = evaluate(given, made), evaluate(given, replace(plan, schedule="zb-h1"))
    assert same[0].step_s == same[1].step_s


@pytest.mark.parametrize(("changes", "words"), tables(__file__)["refused"])
def test_what_is_not_lowered_beside_halves_is_named(changes: dict[str, object], words: str) -> None:
    given = problem(model=layers(4), pp=2, global_batch=8, **changes)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=f"for weight gradients are not lowered with {words}"):
        lower(replace(given.base_plan, schedule="zb-h1"), given)
