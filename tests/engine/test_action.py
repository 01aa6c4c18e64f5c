"""Values that actions name, and texts that are no program (what is one: tests/property)."""

import pickle
from itertools import product

import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.storage import (
    COPY,
    KEPT,
    OFFLOADED,
    REBUILT,
    Role,
    Storage,
    event_of,
    local_event,
    part_of,
    storage_of,
)
from tests.problems import problem
from tests.program_text import from_text, parse_event, parse_program, parse_storage


@pytest.mark.parametrize("line", ["", "F0.3", "F0 compute L0.q", "X0.0 compute L0.q", "F0.0 a b c"])
def test_what_is_no_action_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="not an action"):
        from_text(line)


def test_events_of_a_block_are_known() -> None:
    """Those that a writer makes and no others of a program."""
    given = problem(tp=2, pp=2, global_batch=4)
    actions = [a for rank in lower(given.base_plan, given).ranks for a, _, _ in rank.actions()]
    events = {event for a in actions for event in (a.event, a.exchange.begin) if event}
    named = {str(event) for event in events if not event.is_local}
    assert len(events) > len(named)
    assert named >= {"f_end", "b_end", "recv_f", "sent_b"}
    assert all(event is parse_event(str(event)) for event in events)
    assert local_event(3).later(4) is local_event(7)
    assert event_of("f_end").later(4) is event_of("f_end")


def test_a_block_of_two_micro_batches_is_refused() -> None:
    text = "rank 0\nblock F\nF0.0 compute L0.qkv\nF1.0 compute L0.qkv\n"
    with pytest.raises(ValueError, match=r"one \(micro-batch, chunk\)"):
        parse_program(text)


def test_a_storage_is_the_object_of_its_text() -> None:
    """Also in another process, and of another layer."""
    rows, pieces = ("", KEPT, OFFLOADED, REBUILT, COPY), (None, 0, 12)
    for role, row, piece in product(Role, rows, pieces):
        made = storage_of(part_of("L", 3), "fc2_out", role, row, piece)
        for storage in (made, made.on_host, made.held):
            text = str(storage)
            assert parse_storage(text) is storage is pickle.loads(pickle.dumps(storage))
            assert storage.later(2) is parse_storage(text.replace("L3", "L5"))
            assert storage.is_gradient == text.startswith("d:")


def test_forms_of_a_tensor() -> None:
    tensor = storage_of(part_of("L", 3), "fc2_out")
    forms: dict[str, Storage] = {
        "d:L3.fc2_out": tensor.gradient,
        "L3.fc2_out#k": tensor.with_rows(KEPT),
        "L3.fc2_out%4": tensor.of_piece(4),
        "d:L3.fc2_out%4": tensor.gradient.of_piece(4),
        "L3.fc2_out.r%4": tensor.of_piece(4).with_rows(COPY),
    }
    assert {text: str(form) for text, form in forms.items()} == {text: text for text in forms}
    assert {form.whole for form in forms.values()} == {tensor}
    assert str(tensor.on_host) == "L3.fc2_out@host"


def test_storages_are_sorted_by_number() -> None:
    texts = ["L9.q", "L10.a", "L10.q", "L10.q%2", "L10.q%10", "d:L2.q"]
    found = sorted(map(parse_storage, reversed(texts)), key=lambda storage: storage.order)
    assert [str(storage) for storage in found] == texts


@pytest.mark.parametrize(
    "value",
    [event_of("f_end"), local_event(3), part_of("E")],
)
def test_other_values_are_one_object_in_every_process(value: object) -> None:
    assert pickle.loads(pickle.dumps(value)) is value


def test_a_piece_knows_its_units() -> None:
    piece = part_of("P", 3, units=((part_of("L", 2), 1),))
    assert piece == part_of("P", 3) == "P3"
    assert pickle.loads(pickle.dumps(piece)).units == piece.units == (("L2", 1),)
