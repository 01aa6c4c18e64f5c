"""Names of events and tensors, and texts that are no program (what is one: tests/property)."""

import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import (
    COPY,
    KEPT,
    OFFLOADED,
    REBUILT,
    gradient_buffer,
    gradient_of,
    identity,
    is_gradient,
    is_gradient_buffer,
    is_local,
    local_event,
    piece_tag,
    place,
)
from tests.problems import problem
from tests.program_text import from_text, parse_program


@pytest.mark.parametrize("line", ["", "F0.3", "F0 compute L0.q", "X0.0 compute L0.q", "F0.0 a b c"])
def test_what_is_no_action_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="not an action"):
        from_text(line)


def test_events_of_a_block_are_known_by_name() -> None:
    """Those that a writer makes and no others of a program."""
    assert all(is_local(local_event(number)) for number in (0, 7, 10, 123))
    given = problem(tp=2, pp=2, global_batch=4)
    actions = [a for rank in lower(given.base_plan, given).ranks for a, _, _ in rank.actions()]
    names = {name for a in actions for name in (a.event, a.begin) if name}
    others = {name for name in names if not is_local(name)}
    assert names > others >= {"f_end", "b_end", "recv_f", "sent_b"}
    assert not any(map(is_local, ("", "e", "end", "e_1", "e1x")))


def test_place_of_a_storage() -> None:
    assert place("L12.attn_out#o") == ("L12", "attn_out#o")
    assert place("H.loss_saved") == ("H", "loss_saved")
    assert place("optimizer") == ("", "optimizer")


def test_a_block_of_two_micro_batches_is_refused() -> None:
    text = "rank 0\nblock F\nF0.0 compute L0.qkv\nF1.0 compute L0.qkv\n"
    with pytest.raises(ValueError, match=r"one \(micro-batch, chunk\)"):
        parse_program(text)


@pytest.mark.parametrize("end", ["", KEPT, OFFLOADED, REBUILT, COPY])
@pytest.mark.parametrize("number", [None, 0, 12])
def test_every_form_of_a_name_is_that_of_its_tensor(end: str, number: int | None) -> None:
    name = f"L3.fc2_out{end}{'' if number is None else piece_tag(number)}"
    assert identity(name) == identity(gradient_of(name)) == "L3.fc2_out"
    assert (is_gradient(gradient_of(name)), is_gradient(name)) == (True, False)
    assert (is_gradient_buffer(gradient_buffer("L3")), is_gradient_buffer(name)) == (True, False)
