"""The words both readers read: one explicit action on one stream, printable and parseable.

A tensor name is local to a (micro-batch, chunk): `L3.q` is activation q of the chunk's layer 3,
`E.` the embedding's, `H.` the head's; `d:` a gradient; `.full` a gathered copy, `.part` an output
before its reduction; `#k`, `#o`, `#r` the kept, offloaded and rebuilt rows; `@host` host memory.
"""

import re
from enum import Enum

from msgspec import Struct

from rematbench.operators.ops import Comm, CommKind


class Kind(Enum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD_INPUT = "B"
    BACKWARD_WEIGHT = "W"
    RECOMPUTE = "R"
    D2H = "D2H"
    H2D = "H2D"
    SPLIT = "SPLIT"
    JOIN = "JOIN"
    ALL_GATHER = "AG"
    REDUCE_SCATTER = "RS"
    ALL_REDUCE = "AR"
    ALL_TO_ALL = "A2A"
    RING = "RING"
    SEND = "SEND"
    RECV = "RECV"
    OPTIMIZER = "OPT"
    STALL = "STALL"
    WAIT = "WAIT"
    FREE = "FREE"
    ALLOC = "ALLOC"
    EVENT = "EVENT"

    __hash__ = object.__hash__  # kinds are compared by identity: Enum's own hashes the name again


HOST_UPDATE = "host_update"
"""The stream of an optimizer that runs on the rank's own cores."""
STREAMS = ("compute", "tp", "cp", "pp_send", "pp_recv", "dp", "d2h", "h2d", HOST_UPDATE)
STREAM_INDEX = {name: index for index, name in enumerate(STREAMS)}
HOST = "@host"

STALL = "stall"
"""Operator of a STALL that is of no kernel: what a collective takes of all compute beside it."""

GRADIENTS_DOWN, WEIGHTS_UP, SHARD_UP = "gradients_down", "weights_up", "shard_up"
"""What copies of states carry: gradients to an update on the host, its results, and a rank's shard
of weights in host memory, before it is gathered."""

COMM_KIND: dict[CommKind, Kind] = {
    "all_gather": Kind.ALL_GATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER,
    "all_reduce": Kind.ALL_REDUCE,
    "all_to_all": Kind.ALL_TO_ALL,
    "ring": Kind.RING,
}


class Alloc(Struct, frozen=True, array_like=True, gc=False):
    """A new storage: its local name, its bytes, and the staging slot it lives in (if any)."""

    name: str
    nbytes: int
    slot: str = ""


class Action(Struct, frozen=True, kw_only=True, gc=False):
    """One action of a block, relative to the block's micro-batch and chunk.

    `part` is L<i>, E or H (what the op belongs to), `variant` which of the model's distinct layers,
    `op` the operator or tensor; `event` is recorded when the action ends, `begin` when it starts; a
    WAIT holds its stream until `wait`.  `fraction` is the share of rows worked on, `offset` the
    share of rows before them, `columns` the share of an operator's output columns computed; `comm`
    the collective; `nbytes` a copy's payload; `beside` names the stream of a collective that runs
    during a compute action; `scratch` bytes live inside the action only.
    """

    kind: Kind
    stream: str
    part: str = ""
    op: str = ""
    reads: tuple[str, ...] = ()
    allocs: tuple[Alloc, ...] = ()
    frees: tuple[str, ...] = ()
    event: str = ""
    begin: str = ""
    wait: str = ""
    fraction: float = 1.0
    offset: float = 0.0
    columns: float = 1.0
    comm: Comm | None = None
    nbytes: int = 0
    beside: str = ""
    scratch: int = 0
    variant: int = 0


def _fields(action: Action) -> list[str]:
    pairs = [
        ("r", ",".join(action.reads)),
        ("a", ",".join(_alloc_text(a) for a in action.allocs)),
        ("f", ",".join(action.frees)),
        ("e", action.event),
        ("b", action.begin),
        ("w", action.wait),
        ("x", "" if action.fraction == 1.0 else repr(action.fraction)),
        ("o", repr(action.offset) if action.offset else ""),
        ("y", "" if action.columns == 1.0 else repr(action.columns)),
        ("c", _comm_text(action.comm)),
        ("n", str(action.nbytes) if action.nbytes else ""),
        ("s", action.beside),
        ("t", str(action.scratch) if action.scratch else ""),
        ("v", str(action.variant) if action.variant else ""),
    ]
    return [f"{key}={value}" for key, value in pairs if value]


def _alloc_text(alloc: Alloc) -> str:
    return f"{alloc.name}:{alloc.nbytes}" + (f":{alloc.slot}" if alloc.slot else "")


def _comm_text(comm: Comm | None) -> str:
    return f"{comm.kind}:{comm.group}:{comm.nbytes}" if comm else ""


def to_text(action: Action, micro_batch: int, chunk: int) -> str:
    """One line: `F0.3 compute L1.qkv r=... a=...` (kind, micro-batch.chunk, stream, operator)."""
    where = ".".join(word for word in (action.part, action.op) if word) or "-"
    head = f"{action.kind.value}{micro_batch}.{chunk} {action.stream} {where}"
    return " ".join([head, *_fields(action)])


_PLACE = re.compile(r"(?:(E|H|L\d+)\.)?(.*)")
"""What an action works on: a part (if any) and an operator or tensor of it."""


def place(storage: str) -> tuple[str, str]:
    """(part, tensor) of a storage name; the part is empty where the name has none."""
    found = _PLACE.fullmatch(storage)
    return (found[1] or "", found[2]) if found else ("", storage)


GRADIENT, KEPT, OFFLOADED, REBUILT, COPY = "d:", "#k", "#o", "#r", ".r"
_FORM = re.compile(rf"({KEPT}|{OFFLOADED}|{REBUILT}|{re.escape(COPY)})?(%\d+)?$")
_BUFFER = ".gradients"


def identity(storage: str) -> str:
    """A storage's tensor, whichever gradient, part, copy or piece of it the name means."""
    return _FORM.sub("", storage.removeprefix(GRADIENT))


def gradient_of(storage: str) -> str:
    """Storage of an activation's gradient."""
    return f"{GRADIENT}{storage}"


def is_gradient(storage: str) -> bool:
    """Whether a storage is an activation's gradient."""
    return storage.startswith(GRADIENT)


def piece_tag(number: int) -> str:
    """The end of the names of a mini-sequence's piece."""
    return f"%{number}"


def gradient_buffer(part: str) -> str:
    """Storage of the gradients of all of a part's parameters."""
    return f"{part}{_BUFFER}"


def is_gradient_buffer(storage: str) -> bool:
    """Whether a storage is such a buffer."""
    return storage.endswith(_BUFFER)


_LOCAL = "e"


def local_event(number: int) -> str:
    """Name of a block's own event, which never leaves it: e0, e1, ..."""
    return f"{_LOCAL}{number}"


def is_local(event: str) -> bool:
    """Whether an event is a block's own; others belong to a (micro-batch, chunk)."""
    return event.startswith(_LOCAL) and event[len(_LOCAL) :].isdigit()


LAYER_SLOT = "slot/layer"


def layer_slot(position: int, slots: int) -> str:
    """The rounding buffer of the chunk's unit at a position: they take turns."""
    return f"{LAYER_SLOT}{position % slots}"


def tenant(alloc_name: str, slot: str) -> str:
    """Who shares a staging slot at one time: the tensors of one part in a rounding buffer, those of
    the whole (micro-batch, chunk) in any other slot."""
    return place(alloc_name)[0] if slot.startswith(LAYER_SLOT) else ""


_HEAD = re.compile(r"(?P<kind>[A-Z][A-Z0-9]*[A-Z]|[A-Z])(?P<micro_batch>\d+)\.(?P<chunk>\d+)")


def from_text(line: str) -> tuple[Action, int, int]:
    """Parse `to_text`'s line; ValueError names the line that is not one."""
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
        beside=fields.get("s", ""),
        scratch=int(fields.get("t", "0")),
        variant=int(fields.get("v", "0")),
    )


def _parse_alloc(text: str) -> Alloc:
    name_bytes, _, slot = text.partition(":slot/")
    name, nbytes = name_bytes.rsplit(":", 1)
    return Alloc(name, int(nbytes), f"slot/{slot}" if slot else "")
