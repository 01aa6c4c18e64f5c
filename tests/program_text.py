"""Parses the text of actions and programs, for tests that write programs as lines."""

import re

from rematbench.costs.operators.ops import Comm
from rematbench.engine.program.action import Action, Alloc, Kind, place
from rematbench.engine.program.program import Block, Program, RankProgram, Step

_HEAD = re.compile(r"(?P<kind>[A-Z][A-Z0-9]*[A-Z]|[A-Z])(?P<micro_batch>\d+)\.(?P<chunk>\d+)")


def from_text(line: str) -> tuple[Action, int, int]:
    """(action, micro-batch, chunk) of a line of `to_text`; ValueError names a malformed line."""
    words = line.split()
    head = _HEAD.fullmatch(words[0]) if len(words) > 2 else None
    if head is None:
        raise ValueError(f"not an action: {line!r}")
    try:
        fields = dict(field.split("=", 1) for field in words[3:])
        part, op = place(words[2]) if words[2] != "-" else ("", "")
        action = _build(Kind(head["kind"]), words[1], part, op, fields)
    except ValueError as error:
        raise ValueError(f"not an action: {line!r} ({error})") from error
    return action, int(head["micro_batch"]), int(head["chunk"])


def _build(kind: Kind, stream: str, part: str, op: str, fields: dict[str, str]) -> Action:
    def names(key: str) -> tuple[str, ...]:
        return tuple(fields[key].split(",")) if key in fields else ()

    allocs = tuple(_parse_alloc(text) for text in names("a"))
    comm = None
    if "c" in fields:
        word, group, nbytes = fields["c"].split(":")
        comm = Comm(word, group, int(nbytes))  # type: ignore[arg-type]  # literals, checked by check()
    return Action(
        kind=kind,
        stream=stream,
        part=part,
        op=op,
        reads=names("r"),
        allocs=allocs,
        frees=names("f"),
        event=fields.get("e", ""),
        begin=fields.get("b", ""),
        wait=fields.get("w", ""),
        fraction=float(fields.get("x", "1.0")),
        offset=float(fields.get("o", "0.0")),
        columns=float(fields.get("y", "1.0")),
        comm=comm,
        nbytes=int(fields.get("n", "0")),
        overlaps=fields.get("s", ""),
        beside=fields.get("p", ""),
        scratch=int(fields.get("t", "0")),
        variant=int(fields.get("v", "0")),
        units=names("u"),
    )


def _parse_alloc(text: str) -> Alloc:
    name_bytes, _, slot = text.partition(":slot/")
    name, nbytes = name_bytes.rsplit(":", 1)
    return Alloc(name, int(nbytes), f"slot/{slot}" if slot else "")


def parse_program(text: str) -> Program:
    """The program of a text of `Program.text`; equal blocks become one block, as in `lower`."""
    return Program(
        ranks=tuple(
            _parse_rank(number, re.split(r"^block ", words, flags=re.M)[1:])
            for number, words in enumerate(re.split(r"^rank \d+\n", text, flags=re.M)[1:])
        )
    )


def _parse_rank(rank: int, texts: list[str]) -> RankProgram:
    blocks: dict[Block, int] = {}
    steps: list[Step] = []
    for text in texts:
        label, *lines = text.splitlines()
        items = [from_text(line) for line in lines]
        if len({item[1:] for item in items}) != 1:
            raise ValueError(f"block {label} must hold actions of one (micro-batch, chunk)")
        block = Block(label, tuple(action for action, _, _ in items))
        steps.append(Step(blocks.setdefault(block, len(blocks)), *items[0][1:]))
    return RankProgram(rank=rank, blocks=tuple(blocks), steps=tuple(steps))
