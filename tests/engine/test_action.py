"""Actions print, parse and diff; a whole program comes back from its text."""

import pytest

from rematbench.costs.operators.ops import Comm
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import (
    COPY,
    KEPT,
    OFFLOADED,
    REBUILT,
    Action,
    Alloc,
    Kind,
    from_text,
    gradient_buffer,
    gradient_of,
    identity,
    is_gradient,
    is_gradient_buffer,
    is_local,
    local_event,
    piece_tag,
    place,
    to_text,
)
from rematbench.engine.program.program import parse_program
from tests.problems import problem

LINES = [
    (
        "F0.3 compute L1.qkv r=L1.qkv.full a=L1.q:64,L1.k:32,L1.v:32 e=e2 s=tp",
        Action(
            kind=Kind.FORWARD,
            stream="compute",
            part="L1",
            op="qkv",
            reads=("L1.qkv.full",),
            allocs=(Alloc("L1.q", 64), Alloc("L1.k", 32), Alloc("L1.v", 32)),
            event="e2",
            beside="tp",
        ),
    ),
    (
        "R0.3 compute H.loss r=H.logits x=0.125 t=7",
        Action(
            kind=Kind.RECOMPUTE,
            stream="compute",
            part="H",
            op="loss",
            reads=("H.logits",),
            fraction=0.125,
            scratch=7,
        ),
    ),
    (
        "H2D0.3 h2d L1.q#o r=L1.q#o@host a=L1.q#o:32:slot/reload1 e=h2d n=32",
        Action(
            kind=Kind.H2D,
            stream="h2d",
            part="L1",
            op="q#o",
            reads=("L1.q#o@host",),
            allocs=(Alloc("L1.q#o", 32, "slot/reload1"),),
            event="h2d",
            nbytes=32,
        ),
    ),
    (
        "RS0.3 tp L1.proj r=L1.proj.part a=L1.proj_out:8 e=e4 c=reduce_scatter:tp:16",
        Action(
            kind=Kind.REDUCE_SCATTER,
            stream="tp",
            part="L1",
            op="proj",
            reads=("L1.proj.part",),
            allocs=(Alloc("L1.proj_out", 8),),
            event="e4",
            comm=Comm("reduce_scatter", "tp", 16),
        ),
    ),
    (
        "SEND0.3 pp_send f r=L2.layer_input e=sent_f n=8",
        Action(
            kind=Kind.SEND,
            stream="pp_send",
            op="f",
            reads=("L2.layer_input",),
            event="sent_f",
            nbytes=8,
        ),
    ),
    (
        "WAIT0.3 compute - e=e5 w=recv_f",
        Action(kind=Kind.WAIT, stream="compute", event="e5", wait="recv_f"),
    ),
    (
        "FREE0.3 compute - f=d:L1.q,L1.q@host",
        Action(kind=Kind.FREE, stream="compute", frees=("d:L1.q", "L1.q@host")),
    ),
]


@pytest.mark.parametrize(("line", "action"), LINES, ids=[line.split()[0] for line, _ in LINES])
def test_literal_lines(line: str, action: Action) -> None:
    assert to_text(action, 0, 3) == line
    assert from_text(line) == (action, 0, 3)


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
