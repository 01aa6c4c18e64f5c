"""The actions of a lowered plan. An action runs on one stream and prints as one line."""

from enum import Enum

from msgspec import Struct

from rematbench.costs.operators.ops import Comm, CommKind
from rematbench.engine.program.storage import NO_PART, Event, ModelPart, Slot, Storage


class Kind(Enum):
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

    __hash__ = object.__hash__  # Enum.__hash__ hashes the name at every call, which is slow.


COMPUTE, HOST_UPDATE = "compute", "host_update"
"""The streams of kernels, and of optimizer updates on the rank's own CPU cores."""
STREAMS = (COMPUTE, "tp", "cp", "pp_send", "pp_recv", "dp", "d2h", "h2d", HOST_UPDATE, "ep")
STREAM_INDEX = {name: index for index, name in enumerate(STREAMS)}

STALL = "stall"
"""The operator name of a STALL that belongs to no kernel: the time by which a collective slows the
kernels that run during it."""

GRADIENTS_DOWN, WEIGHTS_UP = "gradients_down", "weights_up"
SHARD_UP, WEIGHTS_DOWN = "shard_up", "weights_down"
"""The operator names of copies of states. If the host updates: its gradients go down, and updated
weights go up. If weights live on the host: a rank's shard goes up before its gather, and weights go
down after an update on the device."""
STATES_UP, STATES_DOWN = "states_up", "states_down"
"""The operator names of a visit's copies: a piece's states to the device, and back."""
STATE_COPIES = (GRADIENTS_DOWN, WEIGHTS_UP, SHARD_UP, WEIGHTS_DOWN, STATES_UP, STATES_DOWN)

COMM_KIND: dict[CommKind, Kind] = {
    "all_gather": Kind.ALL_GATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER,
    "all_reduce": Kind.ALL_REDUCE,
    "all_to_all": Kind.ALL_TO_ALL,
    "ring": Kind.RING,
    "amax": Kind.ALL_REDUCE,
}


class Alloc(Struct, frozen=True, array_like=True, gc=False):
    """A new storage: its bytes, and its staging slot (None: fresh memory)."""

    storage: Storage
    nbytes: int
    slot: Slot | None = None

    @property
    def tenant(self) -> ModelPart:
        """The part whose tensors may occupy the staging slot together. In a slot that is not a
        rounding buffer all tensors of a (micro-batch, chunk) may, and it is NO_PART."""
        by_layer = self.slot is not None and self.slot.by_layer
        return self.storage.part if by_layer else NO_PART


class Rows(Struct, frozen=True, gc=False):
    """The rows on which an action works, as shares of its operator's rows: `fraction` of the rows,
    which follow `offset` of them. `columns`: the share of output columns that is computed."""

    fraction: float = 1.0
    offset: float = 0.0
    columns: float = 1.0


class Exchange(Struct, frozen=True, gc=False):
    """The collective of an action (`comm`), and what runs at the same time. `begin`: the event that
    is recorded when the action starts; `overlaps`: the stream of a collective that runs during a
    compute action; `beside`: the pass of another micro-batch (forward or backward) that runs during
    an exchange of experts."""

    comm: Comm | None = None
    begin: Event | None = None
    overlaps: str = ""
    beside: str = ""


WHOLE, ALONE = Rows(), Exchange()
"""All rows and columns, and nothing exchanged."""


class Action(Struct, frozen=True, kw_only=True, gc=False):
    """An action of a block, relative to the block's micro-batch and chunk.

    `part`: the unit (embedding, layer, head) or the piece of optimizer states on which the action
    works; `variant`: the index of its layer among the model's distinct layers; `op`: the operator
    or tensor.  `event` is recorded when the action ends; a WAIT holds its stream until the event
    `wait`.  `nbytes`: a copy's payload; `scratch`: bytes that only the action itself uses.
    """

    kind: Kind
    stream: str
    part: ModelPart = NO_PART
    op: str = ""
    reads: tuple[Storage, ...] = ()
    allocs: tuple[Alloc, ...] = ()
    frees: tuple[Storage, ...] = ()
    event: Event | None = None
    wait: Event | None = None
    rows: Rows = WHOLE
    exchange: Exchange = ALONE
    nbytes: int = 0
    scratch: int = 0
    variant: int = 0


def _fields(action: Action) -> list[str]:
    rows, exchange, allocs = action.rows, action.exchange, action.allocs
    comm = exchange.comm
    pairs = [
        ("r", _listed(action.reads)),
        ("a", ",".join([f"{a.storage}:{a.nbytes}{f':{a.slot}' * bool(a.slot)}" for a in allocs])),
        ("f", _listed(action.frees)),
        ("e", action.event or ""),
        ("b", exchange.begin or ""),
        ("w", action.wait or ""),
        ("x", "" if rows.fraction == 1.0 else repr(rows.fraction)),
        ("o", repr(rows.offset) if rows.offset else ""),
        ("y", "" if rows.columns == 1.0 else repr(rows.columns)),
        ("c", f"{comm.kind}:{comm.group}:{comm.nbytes}" if comm else ""),
        ("n", action.nbytes or ""),
        ("s", exchange.overlaps),
        ("p", exchange.beside),
        ("t", action.scratch or ""),
        ("v", action.variant or ""),
        ("u", ",".join([f"{unit}.{chunk}" for unit, chunk in action.part.units])),
    ]
    return [f"{key}={value}" for key, value in pairs if value]


def _listed(storages: tuple[Storage, ...]) -> str:
    return ",".join([storage.text for storage in storages])


def to_text(action: Action, micro_batch: int, chunk: int) -> str:
    """Return an action as one line: `F0.3 compute L1.qkv r=... a=...` (kind, micro-batch.chunk,
    stream, operator, fields)."""
    where = ".".join(word for word in (action.part, action.op) if word) or "-"
    head = f"{action.kind.value}{micro_batch}.{chunk} {action.stream} {where}"
    return " ".join([head, *_fields(action)])
