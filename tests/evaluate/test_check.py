"""Rules of check that no mutation of tests/twin breaks, each on the smallest program."""

from itertools import groupby

import pytest

from rematbench.engine.program.program import Program
from rematbench.evaluate.proof import CheckError, check
from tests.program_text import parse_program
from tests.tables import tables


def program(*lines: str) -> Program:
    """One rank, a block wherever the micro-batch changes."""
    blocks = [list(group) for _, group in groupby(lines, key=lambda line: line.split(".")[0][-1])]
    return parse_program("rank 0\n" + "".join("\n".join(["block B", *b, ""]) for b in blocks))


TABLES = tables(__file__)


@pytest.mark.parametrize("lines", TABLES["sound"].values(), ids=TABLES["sound"])
def test_sound(lines: list[str]) -> None:
    check(program(*lines))


@pytest.mark.parametrize(("lines", "message"), TABLES["broken"].values(), ids=TABLES["broken"])
def test_broken(lines: list[str], message: str) -> None:
    with pytest.raises(CheckError, match=message):
        check(program(*lines))


def test_an_event_of_a_block_is_unknown_to_the_next() -> None:
    text = "rank 0\nblock F\nF0.0 compute L0.a a=L0.x:8 e=e0\nblock G\nWAIT0.0 d2h - w=e0\n"
    with pytest.raises(CheckError, match="waits for 'e0'"):
        check(parse_program(text))
