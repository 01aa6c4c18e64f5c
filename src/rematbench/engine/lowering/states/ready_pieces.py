"""Updates of pieces of optimizer states that start during the last backward, as gradients become
ready.

A piece is ready when the gradients of its last unit are reduced in the last backward of the unit's
chunk. Then its gradients go to the host, or its states to the device. An update on the device is
issued when the next piece is ready, so that compute does not wait for the copy. Weights that the
host updated go up after the last backward, because an earlier copy would delay reloads.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.states.emit_states import Reduced
from rematbench.engine.lowering.states.state_pieces import (
    PieceWidths,
    piece_update,
    rank_share,
    unit_ranges,
    visit_of,
)
from rematbench.engine.program.action import (
    COMPUTE,
    GRADIENTS_DOWN,
    HOST_UPDATE,
    STATES_DOWN,
    STATES_UP,
    WEIGHTS_UP,
    Alloc,
    Kind,
)
from rematbench.engine.program.program import Block
from rematbench.engine.program.storage import Event, ModelPart, Storage, UnitOf, event_of, part_of
from rematbench.plan import Piece, Pieces, Plan


class Ready(NamedTuple):
    """A piece, and the units (each with its chunk) whose gradients and weights it covers."""

    piece: Piece
    units: tuple[UnitOf, ...]

    @property
    def part(self) -> ModelPart:
        return part_of("P", self.piece.number, units=self.units)


ReadyPieces = tuple[dict[ModelPart, tuple[Ready, ...]], ...]
"""For each chunk and unit, the pieces that become ready when the unit's gradients are reduced."""


def ready_pieces(chunks: Sequence[ChunkOps], plan: Plan) -> ReadyPieces | None:
    """A rank's pieces by the unit after which they are ready; None without an early start."""
    optimizer = plan.state("optimizer")
    if optimizer.pieces is None or optimizer.pieces.start == "norm" or optimizer.home == "device":
        return None
    ranges = list(unit_ranges(chunks, optimizer))
    found: list[dict[ModelPart, tuple[Ready, ...]]] = [{} for _ in chunks]
    for piece in optimizer.cut(rank_share(chunks, optimizer)):
        within = [one for one in ranges if piece.within(one[2], one[3])]
        chunk, unit, _, _ = within[-1]
        units = tuple((unit.prefix, chunk.chunk) for chunk, unit, _, _ in within)
        due = found[chunk.chunk]
        due[unit.prefix] = (*due.get(unit.prefix, ()), Ready(piece, units))
    return tuple(found)


class ReadyWriter:
    """Writes the updates of a chunk's pieces into the chunk's last backward."""

    def __init__(
        self,
        w: BlockWriter,
        due: Mapping[ModelPart, tuple[Ready, ...]],
        cut: Pieces,
        widths: PieceWidths,
    ) -> None:
        self.w, self.due, self.widths, self.slots = w, due, widths, cut.slots
        self.landing: list[tuple[Ready, tuple[Event, ...], Storage | None]] = []
        """Updates on the device that are not issued yet: (piece, events for which it waits, storage
        of its states or None if they are resident)."""
        self.visiting: list[ModelPart] = []  # visits whose states are on their way back

    def after(self, reduced: Sequence[Reduced]) -> None:
        if due := [(one, events) for unit, events in reduced for one in self.due.get(unit, ())]:
            self._land(len(self.landing))
        for one, events in due:
            match one.piece.place:
                case "device":
                    self.landing.append((one, events, None))
                case "host":
                    self._hosted(one, events)
                case "visit":
                    self._visit(one, events)

    def finish(self, *, last: bool) -> set[Storage]:
        """Issue the remaining updates, and end all visits unless the chunk is the `last` one.
        Return the storages of visits whose states are still on their way back."""
        self._land(len(self.landing))
        while self.visiting and not last:
            _end_visit(self.w, self.visiting.pop(0))
        return set(map(visit_of, self.visiting))

    def _hosted(self, one: Ready, events: tuple[Event, ...]) -> None:
        part, nbytes = one.part, self.widths.down * one.piece.count
        if nbytes:
            down = self.w.state_copy(Kind.D2H, part, GRADIENTS_DOWN, nbytes, after=events[0])
            events = (down,)
        for event in events:
            self.w.wait(HOST_UPDATE, event)
        self.w.add(piece_update(part, one.piece, self.widths, event=_updated(part)))

    def _visit(self, one: Ready, events: tuple[Event, ...]) -> None:
        """Copy a piece's states to the device, once fewer than `slots` visits are in progress."""
        while self.visiting or self.landing:
            flying = len(self.visiting) + sum(states is not None for _, _, states in self.landing)
            if flying < self.slots:
                break
            if self.visiting:
                part = self.visiting.pop(0)
                _end_visit(self.w, part)
            else:
                self._land(1)
        part, nbytes = part_of("P", one.piece.number), self.widths.states * one.piece.count
        states = visit_of(part)
        allocs = (Alloc(states, nbytes),)
        room = self.w.mark(COMPUTE)
        up = self.w.state_copy(Kind.H2D, part, STATES_UP, nbytes, after=room, allocs=allocs)
        self.landing.append((one, (*events, up), states))

    def _land(self, count: int) -> None:
        for one, events, states in self.landing[:count]:
            part, piece = part_of("P", one.piece.number), one.piece
            reads = (states,) if states else ()
            for event in events:
                self.w.wait(COMPUTE, event)
            self.w.add(piece_update(one.part, piece, self.widths, reads))
            if states:
                nbytes, done = self.widths.states * piece.count, self.w.mark(COMPUTE)
                self.w.state_copy(Kind.D2H, part, STATES_DOWN, nbytes, after=done, reads=reads)
                self.w.actions[-1] = replace(self.w.actions[-1], event=_back(part))
                self.visiting.append(part)
        del self.landing[:count]


def _updated(part: ModelPart) -> Event:
    return event_of(f"{part}.updated")


def _back(part: ModelPart) -> Event:
    return event_of(f"{part}.back")


def _end_visit(w: BlockWriter, part: ModelPart) -> None:
    w.wait(COMPUTE, _back(part))
    w.free(visit_of(part))


def ready_end_block(
    due: Sequence[tuple[Ready, ...]], cut: Pieces, widths: PieceWidths, *, last: bool
) -> Block:
    """End the updates of a chunk's pieces: copy the weights that the host updated to the device
    and, for the `last` chunk, wait for the last visits."""
    w = BlockWriter()
    up: Event | None = None
    pieces = [one for each in due for one in each]
    for one in pieces:
        if one.piece.place == "host":
            part, nbytes = one.part, widths.up * one.piece.count
            up = w.state_copy(Kind.H2D, part, WEIGHTS_UP, nbytes, after=_updated(part))
    if up:
        w.wait(COMPUTE, up)
    visits = [one.piece.number for one in pieces if one.piece.place == "visit"]
    for number in visits[-cut.slots :] if last else ():
        _end_visit(w, part_of("P", number))
    return Block("OPT_HOST", tuple(w.actions))
