"""Parameters that DeepSpeed's ZeRO 3 gathers matrix by matrix."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import COMPUTE, Action, Kind
from rematbench.engine.program.storage import Role, Storage
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.plan import MiniSequence, Plan
from rematbench.problem import Problem
from tests.problems import FULL, LLAMA, layers, problem, remade

MATRICES = ("qkv", "proj", "fc1", "fc2")
LAYER = sum(op.parameters for op in problem().layer(0).ops if op.has_weight)
TABLE = LLAMA.vocab * LLAMA.hidden


def zero3(prefetch: int, live: int, deep: int = 4, **changes: Any) -> Problem:
    model = replace(layers(deep), tied_embeddings=changes.pop("tied", False))
    facts = {"prefetch_elements": prefetch, "live_elements": live, **changes}
    return problem(
        model=model, system="deepspeed", dp=2, zero_stage=3, global_batch=4, system_changes=facts
    )


def walk(made: Problem, plan: Plan) -> list[Action]:
    return [action for action, _, _ in lower(plan, made).ranks[0].actions()]


def live_elements(made: Problem, plan: Plan) -> list[int]:
    """Elements that are whole or gathered after each action."""
    alive: dict[Storage, int] = {}
    found = []
    for action in walk(made, plan):
        for alloc in action.allocs:
            if alloc.storage.role is Role.WEIGHTS:
                alive[alloc.storage] = alloc.nbytes // made.system.states.gather_bytes
        for freed in action.frees:
            alive.pop(freed, None)
        found.append(sum(alive.values()))
    assert not alive
    return found


@settings(max_examples=30, deadline=None)
@given(
    prefetch=st.sampled_from([1, LAYER // 2, 10 * LAYER]),
    live=st.sampled_from([1, LAYER, 3 * LAYER, 100 * LAYER]),
    full=st.booleans(),
    tied=st.booleans(),
    pieces=st.booleans(),
)
def test_no_more_is_whole_than_the_limit_and_a_layer(
    prefetch: int, live: int, *, full: bool, tied: bool, pieces: bool
) -> None:
    """The last request may go beyond the limit by a matrix, and the layer that runs is whole."""
    made = zero3(prefetch, live, tied=tied)
    plan = made.base_plan.with_rules(*(FULL if full else ()))
    if pieces:
        plan = replace(plan, mini_sequences=(MiniSequence(("fc1", "act", "mul", "fc2"), 2),))
    check(lower(plan, made))
    assert max(live_elements(made, plan)) <= live + LAYER + 2 * max(LAYER, TABLE)


def test_each_matrix_is_gathered_before_it_is_read() -> None:
    made = zero3(1, 1)
    read = {s for a in walk(made, made.base_plan) for s in a.reads if s.role is Role.WEIGHTS}
    expected = {f"L{layer}.{op}.parameters" for layer in range(4) for op in MATRICES}
    assert set(map(str, read)) == expected | {"E.embedding.parameters", "H.lm_head.parameters"}


def test_a_recomputed_layer_begins_its_backward_with_its_forward() -> None:
    """So its matrices are fetched in that order, once for recomputation and backward."""
    made = zero3(1, 1)
    orders = {}
    for name, rules in (("kept", ()), ("recomputed", FULL)):
        actions = walk(made, made.base_plan.with_rules(*rules))
        gathers = [a.part for a in actions if a.kind is Kind.ALL_GATHER and a.op == "parameters"]
        assert gathers.count("L0.qkv") == 2 * made.layout.num_micro_batches
        half = len(gathers) // made.layout.num_micro_batches
        orders[name] = [part for part in gathers[:half] if part.startswith("L0")][len(MATRICES) :]
    assert orders["recomputed"] == [f"L0.{op}" for op in MATRICES]
    assert orders["kept"] == orders["recomputed"][::-1]


def test_a_forward_leaves_its_last_matrices_to_the_backward() -> None:
    """As many as may be whole; they are gathered once."""
    count = []
    for live in (1, 2 * LAYER, 10**9):
        actions = walk(made := zero3(1, live), made.base_plan)
        gathers = [a for a in actions if a.kind is Kind.ALL_GATHER and a.op == "parameters"]
        count.append(len(gathers) // made.layout.num_micro_batches)
    every = 4 * len(MATRICES) + 2
    assert every == count[-1] < count[1] < count[0] == 2 * every - 1


KERNELS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def test_without_overlap_nothing_is_fetched_ahead() -> None:
    made, ahead = zero3(10**9, 10**9, gather_overlap=False), zero3(1, 1)
    actions = [a for a in walk(made, made.base_plan) if a.op == "parameters" or a.kind in KERNELS]
    for one, other in pairwise(actions):
        assert not (one.op == other.op == "parameters")
    slow, fast = (evaluate(each, each.base_plan).step_s for each in (made, ahead))
    assert slow > fast


@pytest.mark.parametrize("home", [False, True])
def test_a_matrix_waits_on_compute_for_its_gather_or_its_copy(*, home: bool) -> None:
    facts = {"optimizer_on_host": True, "parameters_on_host": True} if home else {}
    made = zero3(1, LAYER, **facts)
    made = remade(made, layout=replace(made.layout, dp=1)) if home else made
    check(lower(made.base_plan, made))
    assert all(a.stream == COMPUTE for a in walk(made, made.base_plan) if a.kind in KERNELS)
