"""Rules of check that no mutation of tests/twin breaks, each on the smallest program."""

from itertools import groupby

import pytest

from rematbench.engine.program.program import Program
from rematbench.evaluate.proof import CheckError, check
from tests.program_text import parse_program


def program(*lines: str) -> Program:
    """One rank, a block wherever the micro-batch changes."""
    blocks = [list(group) for _, group in groupby(lines, key=lambda line: line.split(".")[0][-1])]
    return parse_program("rank 0\n" + "".join("\n".join(["block B", *b, ""]) for b in blocks))


MADE = "F0.0 compute L0.a a=L0.x:8 e=e0"
GATHERED = "AG0.0 tp L0.b r=L0.x a=L0.y:16 e=e2 b=e1 c=all_gather:tp:16"
FORWARD = "F0.0 compute L0.a"
WEIGHT = "W0.0 compute L0.a e=e1"
UPDATE = "OPT0.0 compute optimizer e=e3 n=8"
GATHER = "AG0.0 dp L0.parameters a=L0.parameters:8 c=all_gather:dp:8"
FULL_GRADIENTS = (
    "ALLOC0.0 compute L0.gradients a=L0.gradients:8",
    WEIGHT,
    "WAIT0.0 dp - w=e1",
    "RS0.0 dp L0.gradients r=L0.gradients e=e2 c=reduce_scatter:dp:8",
    "WAIT0.0 compute - w=e2",
    "FREE0.0 compute - f=L0.gradients",
)
SOUND = {
    "a kernel beside its gather waits for the gather's start": (
        MADE,
        "WAIT0.0 tp - w=e0",
        GATHERED,
        "WAIT0.0 compute - w=e1",
        "F0.0 compute L0.b r=L0.y s=tp",
        "WAIT0.0 compute - w=e2",
        "FREE0.0 compute - f=L0.x,L0.y",
    ),
    "a reduction beside its kernel waits for the kernel's start": (
        "F0.0 compute L0.a a=L0.x:8 b=e0 s=tp",
        "WAIT0.0 tp - w=e0",
        "RS0.0 tp L0.a r=L0.x a=L0.y:4 e=e1 c=reduce_scatter:tp:8",
        "WAIT0.0 compute - w=e1",
        "FREE0.0 compute - f=L0.x,L0.y",
    ),
    "transient gradients": FULL_GRADIENTS,
}
BESIDE = SOUND["a kernel beside its gather waits for the gather's start"]
BROKEN = {
    "not made": (
        ("F0.0 compute L0.b r=L0.x",),
        r"rank 0 B0.0 F L0.b: reads L0.x, which is not allocated",
    ),
    "a kernel that does not wait for its gather's start": (
        (*BESIDE[:3], "F0.0 compute L0.b r=L0.y s=tp"),
        "reads L0.y without waiting until tp has written it",
    ),
    "a kernel that is not beside its gather waits for its end": (
        (*BESIDE[:4], "F0.0 compute L0.b r=L0.y"),
        "reads L0.y without waiting until tp has written it",
    ),
    "parameters gathered while they are used": (
        (FORWARD, "AG0.0 dp L0.parameters e=e0 c=all_gather:dp:8"),
        "gathers weights of L0 while compute may still use them",
    ),
    "gradients added to while they are reduced": (
        (
            *FULL_GRADIENTS[:4],
            "ALLOC1.0 compute L0.gradients a=L0.gradients:8",
            "W1.0 compute L0.a",
        ),
        "adds to gradients of L0 while dp may still use them",
    ),
    "an update beside a gather": (
        (FORWARD, GATHER, UPDATE),
        "updates L0 while dp may still use its weights or gradients",
    ),
    "gradients exchanged after their update": (
        (WEIGHT, UPDATE, "WAIT0.0 tp - w=e3", "AR0.0 tp norm_gradients c=all_reduce:tp:8"),
        "exchanges gradients of L0 after their update",
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound(name: str) -> None:
    check(program(*SOUND[name]))


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str) -> None:
    lines, message = BROKEN[name]
    with pytest.raises(CheckError, match=message):
        check(program(*lines))


def test_an_event_of_a_block_is_unknown_to_the_next() -> None:
    text = f"rank 0\nblock F\n{MADE}\nblock G\nWAIT0.0 d2h - w=e0\n"
    with pytest.raises(CheckError, match="waits for 'e0'"):
        check(parse_program(text))
