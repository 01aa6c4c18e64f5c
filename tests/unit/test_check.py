"""Each rule of check on the smallest program that breaks it."""

import pytest

from rematbench.check import CheckError, check, host_tensors
from rematbench.lower import lower
from rematbench.program import Program, parse_program
from rematbench.simulate import DeadlockError
from tests.problems import half, problem


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


def test_host_tensors_are_what_the_plan_copies() -> None:
    given = problem()
    assert host_tensors(lower(given.base_plan, given)) == set()
    names = host_tensors(lower(given.base_plan.with_rules(half()), given))
    assert names
    assert all(name.endswith("@host") for name in names)
