"""Storages, events, slots and parts of the model, to which actions refer. Equal storages, events
and parts are one object. Only this module knows how they are printed.

A storage is local to a (micro-batch, chunk). `L3.q` is activation q of the chunk's layer 3. `E.`
marks a tensor of the embedding, `H.` of the head, `d:` a gradient, `.full` a gathered copy, `.part`
an output before its reduction, `@host` host memory. `#k`, `#o` and `#r` mark the kept, offloaded
and rebuilt rows, `#s` the rows that this rank keeps for its peers, `.r` a rebuilt copy in addition
to the tensor, `%2` piece 2 of a mini-sequence; `^` a storage that all micro-batches of the chunk
use.
"""

from collections.abc import Callable
from enum import Enum
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

from msgspec import Struct

Make = TypeVar("Make", bound=Callable[..., object])
UnitOf = tuple["ModelPart", int]


def _one_object(make: Make) -> Make:
    """Let `make` return one object for equal arguments, even if threads call it at once."""
    known: dict[object, object] = {}

    @wraps(make)
    def find(*fields: object) -> object:
        found = known.get(fields)
        return known.setdefault(fields, make(*fields)) if found is None else found

    return cast(Make, find)


class ModelPart(str):
    """The part of a model on which an action works, as its text: a unit (E, L<i> or H), or a piece
    of optimizer states (P<i>). `letter`: its kind; `number`: the layer or piece, or -1; `op`: the
    operator, if only its parameters are meant; `units`: the units whose gradients and weights a
    piece covers (empty: any)."""

    __slots__ = ("letter", "number", "op", "units")
    letter: str
    number: int
    op: str
    units: tuple[UnitOf, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _part, (self.letter, self.number, self.op, self.units)

    def later(self, layers: int) -> "ModelPart":
        return part_of(self.letter, self.number + layers, self.op)


@_one_object
def _part(letter: str, number: int, op: str, units: tuple[UnitOf, ...]) -> ModelPart:
    text = letter + (str(number) if number >= 0 else "")
    found = ModelPart(f"{text}.{op}" if op else text)
    found.letter, found.number, found.op, found.units = letter, number, op, units
    return found


def part_of(
    letter: str, number: int = -1, op: str = "", units: tuple[UnitOf, ...] = ()
) -> ModelPart:
    """Return the part with these fields; see `ModelPart`."""
    return _part(letter, number, op, units)


NO_PART, EMBEDDING, HEAD = part_of(""), part_of("E"), part_of("H")
SHARE = part_of("V")
"""The unit for a stage's rows of a vocabulary that all stages share."""


class Role(Enum):
    """What a storage contains: (the mark before the storage's name, the word after it)."""

    ACTIVATION = ("", "")
    GATHERED = ("", "full")
    PARTIAL = ("", "part")
    GRADIENT = ("d:", "")
    GATHERED_GRADIENT = ("d:", "full")
    PARTIAL_GRADIENT = ("d:", "part")
    WEIGHTS = ("", "parameters")
    WEIGHT_GRADIENTS = ("", "gradients")
    SUMS = ("", "sums")
    SHARD = ("", "shard")
    STATES = ("", "states")

    __hash__ = object.__hash__  # Enum.__hash__ hashes the name at every call, which is slow.


_VALUES = {
    Role.GRADIENT: Role.ACTIVATION,
    Role.GATHERED_GRADIENT: Role.GATHERED,
    Role.PARTIAL_GRADIENT: Role.PARTIAL,
}
_GRADIENTS = {value: gradient for gradient, value in _VALUES.items()}

KEPT, OFFLOADED, REBUILT, SHARED, COPY = "#k", "#o", "#r", "#s", ".r"
"""The marks of a tensor's rows by their fate, and of a rebuilt copy in addition to the tensor."""
HOST, HELD = "@host", "^"
"""The marks of places other than the device memory of a micro-batch: host memory, and a storage
that one micro-batch allocates for all micro-batches of the chunk, until the rank's last pass."""
EXPERTS = "experts"


class Named(Struct, frozen=True, eq=False, gc=False):
    """A value with a printed form. It is equal only to itself."""

    text: str

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


# Why: docs/decisions/engine.md, Are storages and events texts?
class Storage(Named, frozen=True, eq=False, gc=False):
    """A tensor in memory, or a part of one.

    `tensor`: the activation, operator or buffer; `rows`, `place`: marks of its rows and its memory;
    `piece`: the number of its mini-sequence piece. `label`: its text without the part; `order`: a
    sort key like the text, with numbers sorted by value. `known`: a cache of storages that differ
    from this one in one field.
    """

    part: ModelPart
    tensor: str
    role: Role
    rows: str
    piece: int | None
    place: str
    label: str
    order: tuple[str, int, str, int]
    known: dict[object, "Storage"]

    def __reduce__(self) -> tuple[Any, ...]:
        return _storage, self._fields

    @property
    def _fields(self) -> tuple[Any, ...]:
        return self.part, self.tensor, self.role, self.rows, self.piece, self.place

    def _with(self, key: object, field: int, value: object) -> "Storage":
        """The storage with another value of one field; `key` names the change in `known`."""
        found = self.known.get(key)
        if found is None:
            fields = [*self._fields]
            fields[field] = value
            found = self.known[key] = _storage(*fields)
        return found

    @property
    def is_gradient(self) -> bool:
        return self.role in _VALUES

    @property
    def gradient(self) -> "Storage":
        return self._with("gradient", 2, _GRADIENTS.get(self.role))

    @property
    def whole(self) -> "Storage":
        """The whole tensor of which this storage is the gradient, some rows, a copy or a piece."""
        role = _VALUES.get(self.role, self.role)
        return _storage(self.part, self.tensor, role, "", None, self.place)

    @property
    def on_host(self) -> "Storage":
        return self._with(HOST, 5, HOST)

    @property
    def held(self) -> "Storage":
        """The storage that all micro-batches of the chunk use instead of this one."""
        return self._with(HELD, 5, HELD)

    def with_rows(self, rows: str) -> "Storage":
        """The storage of the rows with one fate, or of a copy; `rows` is one of the marks above."""
        return self._with(rows, 3, rows)

    def of_piece(self, piece: int) -> "Storage":
        return self._with(("piece", piece), 4, piece)

    def later(self, layers: int) -> "Storage":
        return self.known.get(layers) or self._with(layers, 0, self.part.later(layers))


def storage_of(
    part: ModelPart,
    tensor: str = "",
    role: Role = Role.ACTIVATION,
    rows: str = "",
    piece: int | None = None,
) -> Storage:
    """Return the storage with these fields (see `Storage`), in a micro-batch's device memory."""
    return _storage(part, tensor, role, rows, piece, "")


@_one_object
def _storage(
    part: ModelPart, tensor: str, role: Role, rows: str, piece: int | None, place: str
) -> Storage:
    mark, word = role.value
    name = ".".join(filter(None, (tensor, word))) + rows
    number, numbered = (-1, "") if piece is None else (piece, f"%{piece}")
    label = f"{name}{numbered}{place}"
    text = mark + (f"{part}.{label}" if part else label)
    order = (mark + part.letter, part.number, f"{part.op}.{name}", number)
    return Storage(text, part, tensor, role, rows, piece, place, label, order, {})


class Event(Named, frozen=True, eq=False, gc=False):
    """A point in time for which streams can wait.  `number`: the number of an event that is local
    to its block (e0, e1, ...), or -1 for an event of a (micro-batch, chunk).  `message`: the
    direction of the message that arrives (f, b, or e for tied embeddings)."""

    number: int
    message: str
    is_local: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return (local_event, (self.number,)) if self.is_local else (event_of, (self.text,))

    def later(self, by: int) -> "Event":
        """The local event whose number is larger by `by`; another event stays as it is."""
        return local_event(self.number + by) if self.is_local else self


ARRIVED = "recv_"


@_one_object
def event_of(text: str) -> Event:
    """Return the event of a (micro-batch, chunk) with this name; see `Event`."""
    message = text.removeprefix(ARRIVED) if text.startswith(ARRIVED) else ""
    return Event(text, -1, message, is_local=False)


@_one_object
def local_event(number: int) -> Event:
    return Event(f"e{number}", number, "", is_local=True)


def received(message: str) -> Event:
    """Return the event at which a message arrives: of a forward (f), a backward (b), a tied
    embedding's gradient (e), the last stage's output (x), or a message that another stage's part of
    the vocabulary is computed (s or g, followed by the stage)."""
    return event_of(f"{ARRIVED}{message}")


STEP = {"f": 1, "b": -1, "f^": -1, "b^": 1, "f@": 0, "b@": 0}
"""The number of ranks that a message moves ahead, by its word: in a forward (f) or a backward (b);
on the way back from the last rank (^); between the last rank's chunks, where it turns (@)."""


OF_VOCABULARY = "xsg"
"""The first letters of messages between stages that share a vocabulary: the output (x), and that a
stage's part is computed (s, g)."""


def stage_of(word: str, rank: int, pp: int, *, receives: bool) -> int:
    """Return the virtual stage of the rank that receives or sends a message with this word, counted
    from the first virtual stage of the same chunk."""
    back = word[1:] == "^" or (word[1:] == "@" and (word[0] == "f") == receives)
    return pp - 1 - rank if back else rank


RECEIVED = {direction: received(direction) for direction in (*STEP, *"ex")}
SENT = {direction: event_of(f"sent_{direction}") for direction in "fbex"}
"""The events at which a message arrives, and at which its send ends; see `received`."""
ENDED = {"f": event_of("f_end"), "b": event_of("b_end")}
SHARED_OUT = event_of("vocabulary")
"""The end of the sum of the output's gradient over stages that share the vocabulary."""
COPIED_OUT, COPIED_IN, REDUCED = event_of("d2h"), event_of("h2d"), event_of("reduced")
"""The ends of the copies of activations to the host and back, and of the reduction of gradients."""


class Slot(NamedTuple):
    """A staging slot. In a rounding buffer (`by_layer`), the tensors of one part of the model share
    the slot; in other slots, all tensors of a (micro-batch, chunk) do."""

    by_layer: bool
    number: int

    def __str__(self) -> str:
        return f"slot/{'layer' if self.by_layer else 'reload'}{self.number}"
