"""Each rule of check on the smallest program that breaks it."""

from itertools import groupby

import pytest

from rematbench.engine.program.program import Program, parse_program
from rematbench.engine.simulate.step import DeadlockError
from rematbench.evaluate.proof import CheckError, check


def program(*lines: str) -> Program:
    """One rank, one block."""
    return parse_program("rank 0\nblock F\n" + "\n".join(lines) + "\n")


MADE = "F0.0 compute L0.a a=L0.x:8 e=e0"
GATHERED = "AG0.0 tp L0.b r=L0.x a=L0.y:16 e=e2 b=e1 c=all_gather:tp:16"

SOUND = {
    "copy": (
        MADE,
        "WAIT0.0 d2h - w=e0",
        "D2H0.0 d2h L0.x r=L0.x a=L0.x@host:8 e=e1 n=8",
        "WAIT0.0 compute - w=e1",
        "FREE0.0 compute - f=L0.x,L0.x@host",
    ),
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
    "order inside a stream needs no event": (
        MADE,
        "F0.0 compute L0.b r=L0.x",
        "FREE0.0 compute - f=L0.x",
    ),
}
BROKEN = {
    "not made": (("F0.0 compute L0.b r=L0.x",), r"F0.0 F L0.b: reads L0.x, which is not alive"),
    "made twice": ((MADE, MADE), "allocates L0.x, which is alive"),
    "freed twice": (
        (MADE, "FREE0.0 compute - f=L0.x", "FREE0.0 compute - f=L0.x"),
        r"frees L0.x, which is not alive",
    ),
    "leaked": ((MADE,), r"rank 0: L0.x of 0.0 is never freed"),
    "read too early": (
        (MADE, "D2H0.0 d2h L0.x r=L0.x a=L0.x@host:8 n=8"),
        "reads L0.x before compute is known to have made it",
    ),
    "freed too early": (
        (*SOUND["copy"][:3], "FREE0.0 compute - f=L0.x"),
        "frees L0.x while d2h may still use it",
    ),
    "no such event": (("WAIT0.0 compute - w=d2h",), "waits for 'd2h', which nothing has recorded"),
    "a gather that does not wait": (
        (MADE, GATHERED),
        "reads L0.x before compute is known to have made it",
    ),
    "a kernel that does not wait for its gather's start": (
        (*SOUND["a kernel beside its gather waits for the gather's start"][:3],
         "F0.0 compute L0.b r=L0.y s=tp"),
        "reads L0.y before tp is known to have made it",
    ),
    "a kernel that is not beside its gather waits for its end": (
        (*SOUND["a kernel beside its gather waits for the gather's start"][:4],
         "F0.0 compute L0.b r=L0.y"),
        "reads L0.y before tp is known to have made it",
    ),
    "room that compute still uses": (
        (
            MADE,
            "WAIT0.0 tp - w=e0",
            "F0.0 compute L0.b r=L0.x",
            "FREE0.0 compute - f=L0.x",
            "AG0.0 tp L0.c a=L0.z:8 c=all_gather:tp:8",
        ),
        "allocates L0.z where compute may still use what it frees",
    ),
}  # fmt: skip


GATHER = "AG0.0 dp L0.parameters e=e0 c=all_gather:dp:8"
FORWARD = "F0.0 compute L0.a"
WEIGHT = "W0.0 compute L0.a e=e1"
REDUCE = "RS0.0 dp L0.gradients e=e2 c=reduce_scatter:dp:8"
UPDATE = "OPT0.0 compute optimizer e=e3 n=8"
NORMS = "AR0.0 tp norm_gradients c=all_reduce:tp:8"
STEP = (
    GATHER,
    "WAIT0.0 compute - w=e0",
    FORWARD,
    WEIGHT,
    "WAIT0.0 dp - w=e1",
    REDUCE,
    "WAIT0.0 compute - w=e2",
    UPDATE,
    "WAIT0.0 dp - w=e3",
    "AG0.0 dp parameters c=all_gather:dp:8",
)
"""One unit's parameters and gradients in one step: each action waits for the one before it."""
FULL_GRADIENTS = (
    "ALLOC0.0 compute L0.gradients a=L0.gradients:8",
    WEIGHT,
    "WAIT0.0 dp - w=e1",
    "RS0.0 dp L0.gradients r=L0.gradients e=e2 c=reduce_scatter:dp:8",
    "WAIT0.0 compute - w=e2",
    "FREE0.0 compute - f=L0.gradients",
)
LAYERWISE = (
    "AG0.0 dp L0.parameters a=L0.parameters:8 e=e0 c=all_gather:dp:8",
    "WAIT0.0 compute - w=e0",
    "F0.0 compute L0.a r=L0.parameters",
    "F0.0 compute L0.b",
    "FREE0.0 compute - f=L0.parameters",
)
STATES = {"resident": STEP, "transient gradients": FULL_GRADIENTS, "by layer": LAYERWISE}


def missing(steps: tuple[str, ...], *left_out: str) -> tuple[str, ...]:
    return tuple(line for line in steps if line not in left_out)


WRONG_STATES = {
    "parameters used before they are gathered": (
        missing(STEP, "WAIT0.0 compute - w=e0"),
        "uses weights of L0 before dp is known to have gathered them",
    ),
    "parameters gathered while they are used": (
        (FORWARD, GATHER),
        "gathers weights of L0 while compute may still use them",
    ),
    "parameters used without a gather": (
        (*LAYERWISE, FORWARD),
        "uses weights of L0, which are not gathered",
    ),
    "gradients reduced while they are added to": (
        missing(STEP, "WAIT0.0 dp - w=e1"),
        "exchanges gradients of L0 while compute may still use them",
    ),
    "norms' gradients reduced while they are added to": (
        (WEIGHT, NORMS),
        "exchanges gradients of L0 while compute may still use them",
    ),
    "gradients added to after their reduction": (
        (*STEP[:7], WEIGHT),
        "adds to gradients of L0 after their reduction",
    ),
    "gradients added to while they are reduced": (
        (
            *FULL_GRADIENTS[:4],
            "ALLOC1.0 compute L0.gradients a=L0.gradients:8",
            "W1.0 compute L0.a",
        ),
        "adds to gradients of L0 while dp may still use them",
    ),
    "gradients added to without room": (
        (*FULL_GRADIENTS, WEIGHT),
        "adds to L0.gradients, which is not alive",
    ),
    "an update before its reduction": (
        (WEIGHT, UPDATE, "WAIT0.0 dp - w=e1", REDUCE),
        "updates L0 with gradients that are not reduced",
    ),
    "an update beside its reduction": (
        missing(STEP, "WAIT0.0 compute - w=e2"),
        "updates L0 while dp may still use its weights or gradients",
    ),
    "an update beside a gather": (
        (FORWARD, "AG0.0 dp L0.parameters a=L0.parameters:8 c=all_gather:dp:8", UPDATE),
        "updates L0 while dp may still use its weights or gradients",
    ),
    "a gather beside its update": (
        missing(STEP, "WAIT0.0 dp - w=e3"),
        "gathers weights of L0 while compute may still use them",
    ),
    "parameters used after their update": (
        (FORWARD, "OPT0.0 compute L0.optimizer n=8", FORWARD),
        "uses weights of L0 after their update",
    ),
    "gradients exchanged after their update": (
        (WEIGHT, UPDATE, "WAIT0.0 tp - w=e3", NORMS),
        "exchanges gradients of L0 after their update",
    ),
}


def by_micro_batch(lines: tuple[str, ...]) -> Program:
    """As `program`, a block wherever the micro-batch changes."""
    blocks = [list(group) for _, group in groupby(lines, key=lambda line: line.split(".")[0][-1])]
    return parse_program("rank 0\n" + "".join("\n".join(["block B", *b, ""]) for b in blocks))


@pytest.mark.parametrize("name", STATES)
def test_sound_states(name: str) -> None:
    check(program(*STATES[name]))


@pytest.mark.parametrize("name", WRONG_STATES)
def test_wrong_states(name: str) -> None:
    lines, message = WRONG_STATES[name]
    with pytest.raises(CheckError, match=message):
        check(by_micro_batch(lines))


@pytest.mark.parametrize("name", SOUND)
def test_sound(name: str) -> None:
    check(program(*SOUND[name]))


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str) -> None:
    lines, message = BROKEN[name]
    with pytest.raises(CheckError, match=message):
        check(program(*lines))


def test_a_slot_has_one_tenant_at_a_time() -> None:
    """Tensors of one (micro-batch, chunk) share a staging slot; a stranger waits its turn."""
    first = "F0.0 compute L0.a a=L0.x:8:slot/reload0,L1.x:8:slot/reload0"
    freed = "FREE0.0 compute - f=L0.x,L1.x"
    second = "F1.0 compute L0.a a=L0.x:8:slot/reload0"
    last = "FREE1.0 compute - f=L0.x"

    def run(*lines: str) -> None:
        check(parse_program("rank 0\n" + "".join(f"block F\n{line}\n" for line in lines)))

    run(first, freed, second, last)
    with pytest.raises(CheckError, match="slot slot/reload0 still holds L"):
        run(first, second, freed, last)


def test_an_event_of_a_block_is_unknown_to_the_next() -> None:
    text = f"rank 0\nblock F\n{MADE}\nblock G\nWAIT0.0 d2h - w=e0\n"
    with pytest.raises(CheckError, match="waits for 'e0'"):
        check(parse_program(text))


def test_a_receive_without_a_send_is_a_deadlock() -> None:
    with pytest.raises(DeadlockError, match=r"rank 0 waits for message \('f', 0, 0\)"):
        check(
            program(
                "RECV0.0 pp_recv f a=L0.x:8 e=recv_f n=8",
                "WAIT0.0 compute - w=recv_f",
                "FREE0.0 compute - f=L0.x",
            )
        )
