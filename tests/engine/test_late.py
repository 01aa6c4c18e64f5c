"""Tensors made between activations: what the replay of a rank with late tensors reserves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.allocator import MIB
from rematbench.engine.program.program import Late, LateUnit, RankProgram
from rematbench.engine.program.replay import replay
from rematbench.evaluate.evaluation import program_bytes
from rematbench.evaluate.evaluator import evaluate
from rematbench.plan import Plan
from rematbench.problem import Problem
from tests.problems import layers, plan_of, problem
from tests.program_text import parse_program

EARLY = {"mlp_chunks": 1, "head_chunks": 1, "optimizer_in_backward": True}


def rank(*lines: str, late: Late | None) -> RankProgram:
    """A rank of one block per line, all of micro-batch 0 and chunk 0."""
    text = "".join(f"block S\n{line}\n" for line in lines)
    return replace(parse_program(f"rank 0\n{text}").ranks[0], late=late)


def late(
    states: tuple[int, ...] = (), scratch: tuple[int, ...] = (), **gradients: tuple[int, ...]
) -> Late:
    unit = LateUnit(states=states, gradients=gradients, scratch=scratch)
    return Late(units={(0, "L0"): unit})


ALLOC, FREE = f"ALLOC0.0 compute L0.t a=x:{60 * MIB}", "FREE0.0 compute - f=x"


def test_states_take_the_room_that_activations_left() -> None:
    """The moments split the 60 MiB that the first step cached, so the second needs 60 more."""
    lines = (ALLOC, FREE, "OPT0.0 compute -.optimizer n=1")
    states = (20 * MIB, 20 * MIB)
    before = replay(rank(*lines, late=None), states, None)
    after = replay(rank(*lines, late=late(states=states)), (), None)
    assert before.allocated_bytes == after.allocated_bytes == 100 * MIB
    assert before.reserved_bytes == 100 * MIB
    assert after.reserved_bytes == 120 * MIB


def test_states_are_made_at_the_units_own_update() -> None:
    """Updated in the backward, beside an activation that is alive: nothing is split."""
    lines = (ALLOC, "OPT0.0 compute L0.optimizer n=1", FREE)
    found = replay(rank(*lines, late=late(states=(20 * MIB, 20 * MIB))), (), None)
    assert found.reserved_bytes == found.allocated_bytes == 100 * MIB


def test_a_beginning_is_ended_before_the_next_step() -> None:
    """Of a step that is replayed up to its peak, the rest makes what it makes."""
    lines = (ALLOC, FREE, "OPT0.0 compute -.optimizer n=1")
    given = rank(*lines, late=late(states=(20 * MIB, 20 * MIB)))
    assert replay(given, (), None, num_steps=1) == replay(given, (), None)


def test_fresh_gradients_are_freed_after_the_step() -> None:
    grad = "W0.0 compute L0.linear"
    given = rank(ALLOC, grad, FREE, late=late(linear=(30 * MIB,), scratch=(10 * MIB,)))
    first = replay(given, (), None)
    assert first.allocated_bytes == 90 * MIB
    assert replay(given, (), None, passes=4) == first


def test_a_gradient_is_made_where_its_weights_are_differentiated() -> None:
    """A linear's gradient splits the 60 MiB that the first tensor left, so the second needs 60
    more; a norm's, which has no kernel of its own, is made after the unit's backward."""
    first = f"ALLOC0.0 compute L0.t a=x:{60 * MIB}"
    second = f"ALLOC0.0 compute L0.u a=y:{60 * MIB}"
    body = (first, FREE, "W0.0 compute L0.linear", second, "FREE0.0 compute - f=y")
    found = {
        name: replay(rank("\n".join(body), late=late(**{name: (20 * MIB,)})), (), None)
        for name in ("linear", "norm")
    }
    assert {name: peaks.allocated_bytes // MIB for name, peaks in found.items()} == {
        "linear": 80,
        "norm": 80,
    }
    assert found["linear"].reserved_bytes == 120 * MIB
    assert found["norm"].reserved_bytes == 80 * MIB


def test_an_unfused_projection_has_a_gradient_of_its_own() -> None:
    made, plan = accumulated()
    whole, _ = accumulated(fused_linears=True)
    apart, fused = (lower(plan, each).ranks[0].late for each in (made, whole))
    assert apart.gradient_bytes == fused.gradient_bytes
    mine, theirs = apart.units[0, "L1"].gradients, fused.units[0, "L1"].gradients
    assert {op: len(tensors) for op, tensors in mine.items()} == {
        **dict.fromkeys(mine, 1),
        "qkv": 3,
        "fc1": 2,
    }
    assert {op: sum(tensors) for op, tensors in mine.items()} == {
        op: tensors[0] for op, tensors in theirs.items()
    }


def accumulated(**facts: object) -> tuple[Problem, Plan]:
    made = on_one_gpu(2048, 2, **facts)
    return made, made.base_plan


def on_one_gpu(seq_len: int, micro_batches: int, **facts: object) -> Problem:
    return problem(
        model=layers(4),
        system="mst-hf",
        seq_len=seq_len,
        system_changes=facts,
        global_batch=micro_batches,
    )


@pytest.mark.parametrize("facts", [{}, {"late_state_bytes": 0}, {"fresh_gradients": False}])
def test_late_tensors_are_the_states_and_gradients_of_the_ledger(facts: dict[str, object]) -> None:
    """Each fact of the stack stands alone."""
    made, plan = accumulated(**facts)
    (program,) = lower(plan, made).ranks
    held = program_bytes(made, plan, lower(plan, made))[0]
    states = held.optimizer * ("late_state_bytes" not in facts)
    gradients = held.gradient * ("fresh_gradients" not in facts)
    assert (program.late.state_bytes, program.late.gradient_bytes) == (states, gradients)
    if not facts:
        assert held.blocks(program.late) == (held.parameter,)


def test_no_late_tensor_without_a_fact_or_on_the_host() -> None:
    made, plan = accumulated(late_state_bytes=0, fresh_gradients=False)
    assert lower(plan, made).ranks[0].late is None
    host = on_one_gpu(512, 1, optimizer_on_host=True)
    assert lower(host.base_plan, host).ranks[0].late is None


@settings(max_examples=20, deadline=None)
@given(seq_len=st.sampled_from([512, 1536, 4096]), m=st.integers(1, 3), early=st.booleans())
def test_reserved_bytes_hold_the_live_bytes(seq_len: int, m: int, *, early: bool) -> None:
    """Late or not, the ledger's peak fits into what the allocator reserves, and no second moves."""
    if early and m > 1:
        return
    before = on_one_gpu(seq_len, m, late_state_bytes=0, fresh_gradients=False)
    results = []
    for each in (on_one_gpu(seq_len, m), before):
        plan = plan_of(each, "mst", **EARLY) if early else each.base_plan
        found = evaluate(each, plan)
        assert found.reserved_bytes >= max(found.peak_device_bytes)
        results.append(found)
    assert results[0].step_s == results[1].step_s
    assert results[0].peak_device_bytes == results[1].peak_device_bytes
