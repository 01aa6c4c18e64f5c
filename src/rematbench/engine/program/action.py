"""The actions of a lowered plan.  Each action runs on one stream and prints as one line.

A storage name is local to a (micro-batch, chunk).  `L3.q` is activation q of the chunk's layer 3.
`E.` marks a tensor of the embedding, `H.` of the head, `d:` a gradient, `.full` a gathered copy,
`.part` an output before its reduction, `@host` host memory.  `#k`, `#o` and `#r` mark the kept,
offloaded and rebuilt rows; `^` a storage that all micro-batches of the chunk use.
"""

import re
from enum import Enum
from functools import cache, lru_cache

from msgspec import Struct

from rematbench.costs.operators.ops import Comm, CommKind


class Kind(Enum):
    """Kinds of actions."""

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

    __hash__ = object.__hash__  # by identity: Enum's own hashes the name each time


COMPUTE, HOST_UPDATE = "compute", "host_update"
"""The streams of kernels, and of an optimizer that runs on the rank's own CPU cores."""
STREAMS = (COMPUTE, "tp", "cp", "pp_send", "pp_recv", "dp", "d2h", "h2d", HOST_UPDATE, "ep")
STREAM_INDEX = {name: index for index, name in enumerate(STREAMS)}
HOST = "@host"

STALL = "stall"
"""The operator name of a STALL that belongs to no kernel: the time by which a collective slows all
kernels that run at the same time."""

GRADIENTS_DOWN, WEIGHTS_UP = "gradients_down", "weights_up"
SHARD_UP, WEIGHTS_DOWN = "shard_up", "weights_down"
"""The operator names of copies of states: gradients to an update on the host, the updated weights
back; a rank's shard of weights in host memory before its gather, and after an update on the
device."""
STATES_UP, STATES_DOWN, CAST = "states_up", "states_down", "cast"
"""The operator names of a visit's copies: a piece's states to the device for its update, and back;
and of the device's cast of master weights that went up."""
STATE_COPIES = (GRADIENTS_DOWN, WEIGHTS_UP, SHARD_UP, WEIGHTS_DOWN, STATES_UP, STATES_DOWN)

COMM_KIND: dict[CommKind, Kind] = {
    "all_gather": Kind.ALL_GATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER,
    "all_reduce": Kind.ALL_REDUCE,
    "all_to_all": Kind.ALL_TO_ALL,
    "ring": Kind.RING,
}


class Alloc(Struct, frozen=True, array_like=True, gc=False):
    """A new storage: its local name, its bytes, and its staging slot (empty: fresh memory)."""

    name: str
    nbytes: int
    slot: str = ""


class Action(Struct, frozen=True, kw_only=True, gc=False):
    """An action of a block, relative to the block's micro-batch and chunk.

    `part`: the action's unit (L<i>, E or H), or a piece of optimizer states (P<i>); `variant`: the
    index of its layer among the model's distinct layers; `op`: the operator or tensor.  `event` is
    recorded when the action ends, `begin` when the action starts; a WAIT holds its stream until the
    event `wait`.  `fraction`: the share of rows processed; `offset`: the share of rows before them;
    `columns`: the share of an operator's output columns computed.  `comm`: the collective;
    `nbytes`: a copy's payload; `overlaps`: the stream of a collective that runs during a compute
    action; `beside`: the pass of another micro-batch, forward or backward, during which an exchange
    of experts runs; `scratch`: bytes that only the action itself uses.  `units`: the units, each
    with its chunk (`L3.1`), whose gradients and weights a piece has (empty: any unit's).
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
    overlaps: str = ""
    beside: str = ""
    scratch: int = 0
    variant: int = 0
    units: tuple[str, ...] = ()


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
        ("s", action.overlaps),
        ("p", action.beside),
        ("t", str(action.scratch) if action.scratch else ""),
        ("v", str(action.variant) if action.variant else ""),
        ("u", ",".join(action.units)),
    ]
    return [f"{key}={value}" for key, value in pairs if value]


def _alloc_text(alloc: Alloc) -> str:
    return f"{alloc.name}:{alloc.nbytes}" + (f":{alloc.slot}" if alloc.slot else "")


def _comm_text(comm: Comm | None) -> str:
    return f"{comm.kind}:{comm.group}:{comm.nbytes}" if comm else ""


def to_text(action: Action, micro_batch: int, chunk: int) -> str:
    """Return an action as one line: `F0.3 compute L1.qkv r=... a=...` (kind, micro-batch.chunk,
    stream, operator, fields)."""
    where = ".".join(word for word in (action.part, action.op) if word) or "-"
    head = f"{action.kind.value}{micro_batch}.{chunk} {action.stream} {where}"
    return " ".join([head, *_fields(action)])


_PLACE = re.compile(r"(?:(E|H|L\d+|P\d+)\.)?(.*)")
"""The name of a storage: its part (may be missing), and its operator or tensor."""


@lru_cache(maxsize=1 << 15)
def place(storage: str) -> tuple[str, str]:
    """Split a storage name into (part, tensor); part is empty if the name has none."""
    found = _PLACE.fullmatch(storage)
    return (found[1] or "", found[2]) if found else ("", storage)


GRADIENT, KEPT, OFFLOADED, REBUILT, COPY = "d:", "#k", "#o", "#r", ".r"
_FORM = re.compile(rf"({KEPT}|{OFFLOADED}|{REBUILT}|{re.escape(COPY)})?(%\d+)?$")
_BUFFER, _WEIGHTS, _STATES = ".gradients", ".parameters", ".states"
_EXPERTS = f".experts{_WEIGHTS}"
_SUMS, _SHARD, HELD = ".sums", ".shard", "^"


def identity(storage: str) -> str:
    """Return the tensor of a storage name, without the marks of gradient, rows, copy and piece."""
    return _FORM.sub("", storage.removeprefix(GRADIENT))


def gradient_of(storage: str) -> str:
    """The storage name of an activation's gradient."""
    return f"{GRADIENT}{storage}"


def is_gradient(storage: str) -> bool:
    """Whether a storage is an activation's gradient."""
    return storage.startswith(GRADIENT)


def piece_tag(number: int) -> str:
    """The suffix of storage names in piece `number` of a mini-sequence."""
    return f"%{number}"


def gradient_buffer(part: str) -> str:
    """The storage name of the buffer for the gradients of all parameters of a part."""
    return f"{part}{_BUFFER}"


def is_gradient_buffer(storage: str) -> bool:
    """Whether a storage is a gradient buffer."""
    return storage.endswith(_BUFFER)


def parameter_buffer(part: str) -> str:
    """The storage name of the buffer for the gathered parameters of a part."""
    return f"{part}{_WEIGHTS}"


def expert_buffer(part: str) -> str:
    """The storage name of the buffer for the gathered parameters of a part's experts."""
    return f"{part}{_EXPERTS}"


def is_expert_buffer(storage: str) -> bool:
    """Whether a storage is a buffer of gathered parameters of experts."""
    return storage.removesuffix(HELD).endswith(_EXPERTS)


def piece_part(number: int) -> str:
    """The part of the actions on a piece of optimizer states."""
    return f"P{number}"


def is_piece(part: str) -> bool:
    """Whether a part is a piece of optimizer states."""
    return part.startswith("P")


def visit_buffer(part: str) -> str:
    """The storage name of a piece's states while they are on the device."""
    return f"{part}{_STATES}"


def is_visit_buffer(storage: str) -> bool:
    """Whether a storage has the states of a piece that visits the device."""
    return storage.endswith(_STATES)


def master_buffer(part: str) -> str:
    """The storage name of a piece's master weights that went up and are not cast yet."""
    return f"{part}.master"


def held(storage: str) -> str:
    """The name of a storage that one micro-batch of a chunk allocates for all of them, until the
    rank's last pass."""
    return f"{storage}{HELD}"


def is_held(storage: str) -> bool:
    """Whether all micro-batches of a chunk use a storage of one of them."""
    return storage.endswith(HELD)


def gradient_sums(part: str) -> str:
    """The storage name of the sums of a part's gradients over the micro-batches."""
    return held(f"{part}{_SUMS}")


def gradient_shard(part: str) -> str:
    """The storage name of a rank's shard of a part's reduced gradients."""
    return held(f"{part}{_SHARD}")


def is_parameter_buffer(storage: str) -> bool:
    """Whether a storage is a buffer of gathered parameters."""
    return storage.endswith(_WEIGHTS)


_LOCAL = "e"


def local_event(number: int) -> str:
    """The name of an event that only its block uses: e0, e1, ..."""
    return f"{_LOCAL}{number}"


@cache
def is_local(event: str) -> bool:
    """Whether an event is local to its block; other events belong to a (micro-batch, chunk)."""
    return event.startswith(_LOCAL) and event[len(_LOCAL) :].isdigit()


def event_number(event: str) -> int:
    """The number of an event that is local to its block."""
    return int(event[len(_LOCAL) :])


def later_event(event: str, by: int) -> str:
    """Return the event's name with its number raised by `by`.  An event that other blocks wait for
    keeps its name."""
    return local_event(event_number(event) + by) if is_local(event) else event


_OF_LAYER = re.compile(rf"({GRADIENT}L|L)(\d+)(.*)")


@lru_cache(maxsize=1 << 15)
def in_layer(name: str) -> tuple[str, int, str] | None:
    """Split the name of a layer's storage or part around the layer's number: (`d:L`, 3, `.q`); None
    for a name without a layer."""
    found = _OF_LAYER.fullmatch(name)
    return (found[1], int(found[2]), found[3]) if found else None


_OF_PIECE = re.compile(r"(.*%)(\d+)(.*)")


@lru_cache(maxsize=1 << 15)
def in_piece(name: str) -> tuple[str, int, str] | None:
    """Split the name of a piece's storage around the piece's number: (`L3.act%`, 2, ``); None for a
    name without a piece."""
    found = _OF_PIECE.fullmatch(name) if "%" in name else None
    return (found[1], int(found[2]), found[3]) if found else None


_NUMBER = re.compile(r"(\d+)")


@lru_cache(maxsize=1 << 15)
def by_number(name: str) -> list[str | int]:
    """A sort key of names in which numbers count by value: layer 9 comes before layer 10."""
    words: list[str | int] = [*_NUMBER.split(name)]
    words[1::2] = map(int, words[1::2])
    return words


LAYER_SLOT = "slot/layer"


def layer_slot(position: int, slots: int) -> str:
    """Return the rounding buffer of the unit at a position in its chunk.  Units take the buffers in
    turn."""
    return f"{LAYER_SLOT}{position % slots}"


def tenant(alloc_name: str, slot: str) -> str:
    """Return the key of the tensors that share a staging slot at the same time.  In a rounding
    buffer the key is the part.  Elsewhere it is empty: all tensors of a (micro-batch, chunk) share
    the slot."""
    return place(alloc_name)[0] if slot.startswith(LAYER_SLOT) else ""
