"""Parses the text of actions and programs, for tests that write programs as lines."""

import re

from rematbench.costs.operators.ops import Comm
from rematbench.engine.program.action import Action, Alloc, Exchange, Kind, Rows
from rematbench.engine.program.program import Block, Program, RankProgram, Step
from rematbench.engine.program.storage import (
    HELD,
    HOST,
    RECEIVED,
    Event,
    ModelPart,
    Role,
    Slot,
    Storage,
    event_of,
    local_event,
    part_of,
    storage_of,
)

_HEAD = re.compile(r"(?P<kind>[A-Z][A-Z0-9]*[A-Z]|[A-Z])(?P<micro_batch>\d+)\.(?P<chunk>\d+)")
_PART = re.compile(r"(E|H|[LP](?=\d))(\d+)?(?:\.(\w+))?")
_STORAGE = re.compile(
    r"(?P<before>d:)?(?:(?P<part>E|H|[LP]\d+)\.)?(?P<name>[\w.]+?)(?P<rows>#k|#o|#r|\.r)?"
    r"(?:%(?P<piece>\d+))?(?P<place>@host|\^)?"
)


def parse_part(text: str) -> ModelPart:
    """The part of a text such as `L3`."""
    found = _PART.fullmatch(text)
    assert found or not text, text
    return part_of(found[1], int(found[2] or -1), found[3] or "") if found else part_of("")


def parse_storage(text: str) -> Storage:
    """The storage of a text such as `d:L3.q%2`."""
    found = _STORAGE.fullmatch(text)
    assert found, text
    before, part, name, rows, piece, place = found.groups("")
    words = {role.value: role for role in Role}
    tensor, _, word = f".{name}".rpartition(".")
    role = words.get((before, word)) if word else None
    if role is None:
        tensor, role = f"{tensor}.{word}", words[before, ""]
    number = int(piece) if piece else None
    made = storage_of(parse_part(part), tensor[1:], role, rows, number)
    return {HOST: made.on_host, HELD: made.held}.get(place, made)


def parse_event(text: str) -> Event | None:
    """The event of a text such as `e3` or `f_end`; None for an empty text."""
    if re.fullmatch(r"e\d+", text):
        return local_event(int(text[1:]))
    received = {event.text: event for event in RECEIVED.values()}
    return received.get(text) or event_of(text) if text else None


def from_text(line: str) -> tuple[Action, int, int]:
    """(action, micro-batch, chunk) of a line of `to_text`; ValueError names a malformed line."""
    words = line.split()
    head = _HEAD.fullmatch(words[0]) if len(words) > 2 else None
    if head is None:
        raise ValueError(f"not an action: {line!r}")
    try:
        fields = dict(field.split("=", 1) for field in words[3:])
        action = _build(Kind(head["kind"]), words[1], words[2].removeprefix("-"), fields)
    except ValueError as error:
        raise ValueError(f"not an action: {line!r} ({error})") from error
    return action, int(head["micro_batch"]), int(head["chunk"])


def _build(kind: Kind, stream: str, where: str, fields: dict[str, str]) -> Action:
    def texts(key: str) -> list[str]:
        return fields[key].split(",") if key in fields else []

    found = re.fullmatch(r"(?:(E|H|[LP]\d+)\.)?(.*)", where)
    assert found is not None
    units = [text.rpartition(".") for text in texts("u")]
    part = parse_part(found[1] or "")
    if units:
        of = tuple((parse_part(unit), int(chunk)) for unit, _, chunk in units)
        part = part_of(part.letter, part.number, units=of)
    comm = None
    if "c" in fields:
        word, group, nbytes = fields["c"].split(":")
        comm = Comm(word, group, int(nbytes))  # type: ignore[arg-type]  # literals, checked by check()
    begin = parse_event(fields.get("b", ""))
    rows = [float(fields.get(key, default)) for key, default in zip("xoy", "101", strict=True)]
    return Action(
        kind=kind,
        stream=stream,
        part=part,
        op=found[2],
        reads=tuple(map(parse_storage, texts("r"))),
        allocs=tuple(map(_parse_alloc, texts("a"))),
        frees=tuple(map(parse_storage, texts("f"))),
        event=parse_event(fields.get("e", "")),
        wait=parse_event(fields.get("w", "")),
        rows=Rows(*rows),
        exchange=Exchange(comm, begin, fields.get("s", ""), fields.get("p", "")),
        nbytes=int(fields.get("n", "0")),
        scratch=int(fields.get("t", "0")),
        variant=int(fields.get("v", "0")),
    )


def _parse_alloc(text: str) -> Alloc:
    name, nbytes, *slot = re.split(r":(?=\d|slot)", text)
    found = re.fullmatch(r"slot/(layer|reload)(\d+)", slot[0]) if slot else None
    where = Slot(found[1] == "layer", int(found[2])) if found else None
    return Alloc(parse_storage(name), int(nbytes), where)


def parse_program(text: str) -> Program:
    """The program of a text of `Program.text`; equal blocks of a chunk become one block."""
    ranks = tuple(
        _parse_rank(number, re.split(r"^block ", words, flags=re.M)[1:])
        for number, words in enumerate(re.split(r"^rank \d+\n", text, flags=re.M)[1:])
    )
    tied = [r.rank for r in ranks if any(a.op == "tied" for b in r.blocks for a in b.actions)]
    return Program(ranks=ranks, embedding=(tied[0], tied[-1]) if tied else (0, 0))


def _parse_rank(rank: int, texts: list[str]) -> RankProgram:
    blocks: dict[tuple[Block, int], int] = {}  # what a block frees has the bytes of its chunk
    steps: list[Step] = []
    for text in texts:
        label, *lines = text.splitlines()
        items = [from_text(line) for line in lines]
        if len({item[1:] for item in items}) != 1:
            raise ValueError(f"block {label} must hold actions of one (micro-batch, chunk)")
        block = Block(label, tuple(action for action, _, _ in items))
        micro_batch, chunk = items[0][1:]
        steps.append(Step(blocks.setdefault((block, chunk), len(blocks)), micro_batch, chunk))
    return RankProgram(rank=rank, blocks=tuple(block for block, _ in blocks), steps=tuple(steps))
