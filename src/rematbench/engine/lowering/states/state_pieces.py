"""The update of a rank's optimizer states, piece by piece, on the device and on the host.

For a piece that the host updates, gradients go down and weights go up.  For a piece that visits the
device, states go up, are updated there and go down.  The host's updates, the copies of visits and
the copies of updated weights run on different streams, so they overlap if the plan has slots for
visits.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from msgspec import Struct

from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps, Unit
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.states.state_shards import sharded
from rematbench.engine.program.action import (
    COMPUTE,
    GRADIENTS_DOWN,
    HOST_UPDATE,
    STATES_DOWN,
    STATES_UP,
    WEIGHTS_DOWN,
    WEIGHTS_UP,
    Action,
    Alloc,
    Kind,
)
from rematbench.engine.program.program import Block
from rematbench.engine.program.storage import (
    NO_PART,
    Event,
    ModelPart,
    Role,
    Storage,
    part_of,
    storage_of,
)
from rematbench.plan import Piece, Pieces, Plan, StateFate
from rematbench.problem import Problem


class PieceWidths(Struct, frozen=True, kw_only=True):
    """Bytes per parameter. `param`: weights in compute precision; `states`: master weights and
    moments; `scratch`: temporary bytes of an update on the device; `down`: gradients that go to the
    host for its update; `up`: weights that go to the device after the host's update (0: weights
    live on the host); `back`: weights that go to the host after an update on the device."""

    param: int
    states: int
    scratch: int
    down: int
    up: int
    back: int


def piece_widths(plan: Plan, problem: Problem) -> PieceWidths:
    system, here = problem.system, plan.state("parameter").home == "device"
    return PieceWidths(
        param=system.states.param_bytes,
        states=system.states.optimizer_bytes,
        scratch=system.states.step_scratch_bytes,
        down=0 if plan.state("gradient").home == "host" else system.host.host_grad_bytes,
        up=system.states.param_bytes * here,
        back=system.states.param_bytes * (not here),
    )


Leaving = tuple[dict[ModelPart, int], ...]
"""For each chunk and unit, the number of parameters whose gradients go to the host once reduced."""


def gradients_that_leave(chunks: Sequence[ChunkOps], plan: Plan) -> Leaving | None:
    """The number of each unit's gradients that go to the host; None if all or none do."""
    optimizer = plan.state("optimizer")
    if optimizer.pieces is None or plan.state("gradient").home == "device":
        return None
    pieces = [p for p in optimizer.cut(rank_share(chunks, optimizer)) if p.place == "host"]
    found: Leaving = tuple({} for _ in chunks)
    for chunk, unit, start, stop in unit_ranges(chunks, optimizer):
        leaving = sum(piece.within(start, stop) for piece in pieces)
        found[chunk.chunk][unit.prefix] = leaving
    return found


def rank_share(chunks: Sequence[ChunkOps], optimizer: StateFate) -> int:
    """The number of parameters that a rank's optimizer updates."""
    units = [unit for chunk in chunks for unit in chunk.units]
    experts = sum(unit.table.trained_experts for unit in units)
    rest = sum(unit.trained for unit in units) - experts
    return sharded(rest, experts, optimizer, chunks[0].problem.layout)


def unit_ranges(
    chunks: Sequence[ChunkOps], optimizer: StateFate
) -> Iterator[tuple[ChunkOps, Unit, int, int]]:
    """Yield each unit of a rank with its range [start, stop) of the rank's share, in the order in
    which gradients become ready."""
    start = 0
    for chunk in reversed(chunks):
        for unit in reversed(chunk.units):
            experts = unit.table.trained_experts
            rest, layout = unit.trained - experts, chunk.problem.layout
            stop = start + sharded(rest, experts, optimizer, layout)
            yield chunk, unit, start, stop
            start = stop


def visit_of(part: ModelPart) -> Storage:
    return storage_of(part, role=Role.STATES)


def piece_update(
    part: ModelPart,
    piece: Piece,
    widths: PieceWidths,
    reads: tuple[Storage, ...] = (),
    event: Event | None = None,
) -> Action:
    """Return the update of a piece: on the host if it has an `event`, which records its end;
    otherwise on the device, where it `reads` the piece's states (empty: they are resident)."""
    return Action(
        kind=Kind.OPTIMIZER,
        stream=HOST_UPDATE if event else COMPUTE,
        part=part,
        op="optimizer",
        reads=reads,
        nbytes=widths.param * piece.count,
        scratch=0 if event else widths.scratch * piece.count,
        event=event,
    )


def update_block(pieces: Sequence[Piece], cut: Pieces | None, widths: PieceWidths) -> Block:
    """Update a rank's pieces, some of which are not resident on the device. Without `cut` there is
    a single piece, which has no name in the actions."""
    return Block("OPT_HOST", tuple(_Writer(pieces, cut, widths).run()))


class _Writer:
    def __init__(self, pieces: Sequence[Piece], cut: Pieces | None, widths: PieceWidths) -> None:
        self.pieces, self.widths = pieces, widths
        self.slots, self.named = (cut.slots if cut else 0), cut is not None
        self.w = BlockWriter()
        self.ready = self.w.mark(COMPUTE)
        """The event after which a piece may start: all gradients and their norm are known and,
        without slots, the previous piece has ended."""
        self.visiting: list[tuple[Event, Storage]] = []  # (end, states) of each visit in flight
        self.updated: tuple[Piece, Event] | None = None  # by the host, weights not copied up yet
        self.down: dict[int, Event] = {}  # the arrival of gradients on the host, by piece
        self.back: list[Event] = []
        hosted = [piece for piece in pieces if piece.place == "host"]
        self.next = {one.number: other for one, other in pairwise(hosted)} if self.slots else {}

    def run(self) -> list[Action]:
        write = {"device": self._on_device, "host": self._hosted, "visit": self._visit}
        for piece in self.pieces:
            write[piece.place](piece)
        self._weights_up()
        self._end_visits(0)
        for event in self.back:
            self.w.wait(COMPUTE, event)
        return self.w.actions

    def _part(self, piece: Piece) -> ModelPart:
        return part_of("P", piece.number) if self.named else NO_PART

    def _on_device(self, piece: Piece, reads: tuple[Storage, ...] = ()) -> None:
        widths, part = self.widths, self._part(piece)
        self.w.add(piece_update(part, piece, widths, reads))
        if widths.back:
            done, nbytes = self.w.mark(COMPUTE), widths.back * piece.count
            self.back.append(self.w.state_copy(Kind.D2H, part, WEIGHTS_DOWN, nbytes, after=done))

    def _hosted(self, piece: Piece) -> None:
        """Update a piece on the host, while the gradients of the next such piece go down."""
        self._weights_up()
        self.w.wait(HOST_UPDATE, self._gradients(piece))
        done = self.w.new_event()
        self.w.add(piece_update(self._part(piece), piece, self.widths, event=done))
        self.updated = (piece, done)
        if piece.number in self.next:
            after = self.next[piece.number]
            self.down[after.number] = self._gradients(after)
        if not self.slots:
            self._weights_up()
            self.ready = self.w.mark(COMPUTE)

    def _gradients(self, piece: Piece) -> Event:
        arrived, nbytes = self.down.pop(piece.number, None), self.widths.down * piece.count
        if arrived or not nbytes:
            return arrived or self.ready
        part = self._part(piece)
        return self.w.state_copy(Kind.D2H, part, GRADIENTS_DOWN, nbytes, after=self.ready)

    def _weights_up(self) -> None:
        if self.updated is None:
            return
        (piece, done), self.updated = self.updated, None
        part, nbytes = self._part(piece), self.widths.up * piece.count
        if nbytes:
            done = self.w.state_copy(Kind.H2D, part, WEIGHTS_UP, nbytes, after=done)
        if self.slots:
            self.back.append(done)
        else:
            self.w.wait(COMPUTE, done)

    def _visit(self, piece: Piece) -> None:
        self._end_visits(max(0, self.slots - 1))
        part, nbytes = self._part(piece), self.widths.states * piece.count
        states = visit_of(part)
        room, allocs = self.w.mark(COMPUTE), (Alloc(states, nbytes),)
        up = self.w.state_copy(Kind.H2D, part, STATES_UP, nbytes, after=room, allocs=allocs)
        self.w.wait(COMPUTE, up)
        self._on_device(piece, (states,))
        done = self.w.mark(COMPUTE)
        end = self.w.state_copy(Kind.D2H, part, STATES_DOWN, nbytes, after=done, reads=(states,))
        self.visiting.append((end, states))
        if not self.slots:
            self._end_visits(0)
            self.ready = self.w.mark(COMPUTE)

    def _end_visits(self, leave: int) -> None:
        """Wait for the oldest visits until only `leave` are in flight, and free their storages."""
        while len(self.visiting) > leave:
            end, states = self.visiting.pop(0)
            self.w.wait(COMPUTE, end)
            self.w.free(states)
