"""Writes the actions of a block: events, waits, collectives, and frees derived from liveness."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from rematbench.costs.operators.ops import Comm, Op
from rematbench.engine.lowering.blocks.liveness import free_action, frees_by_action
from rematbench.engine.lowering.blocks.repeated_pieces import Position, RepeatedPiece
from rematbench.engine.program.action import (
    COMM_KIND,
    COMPUTE,
    STALL,
    Action,
    Alloc,
    Kind,
    is_expert_buffer,
    local_event,
)
from rematbench.engine.program.program import Block

# Locals, because a lookup in an Enum is slow and every action needs these.
WAIT, UNTIMED, FORWARD_KINDS = Kind.WAIT, (Kind.FREE, Kind.ALLOC), (Kind.FORWARD, Kind.RECOMPUTE)


class Share(NamedTuple):
    """The rows on which an action works, as shares of its operator's rows."""

    fraction: float
    offset: float = 0.0


WHOLE = Share(1.0)

WeightReader = Callable[["BlockWriter", str, Op], tuple[str, ...]]
"""Gathers the weights that a kernel (writer, part, operator) reads; returns their storages."""


class BlockWriter:
    """Collects a block's actions in issue order; its events are local to the block.  `unit_starts`:
    where each unit begins; `compact`: whether a piece may stand for further pieces."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.parameters: dict[str, tuple[str, ...]] = {}  # gathered copies, by part that reads them
        self.weights: WeightReader | None = None
        self.slots: dict[str, str] = {}  # storage -> staging slot
        self.beside = ""  # the pass of another micro-batch that runs beside the block
        self.unit_starts: list[Position] = []
        self.compact = True
        self._repeated: list[RepeatedPiece] = []
        self._events = 0

    def add(self, action: Action) -> int:
        """Append an action and return its index."""
        slots, allocs = self.slots, action.allocs
        if slots and allocs and any([alloc.name in slots for alloc in allocs]):
            allocs = tuple([Alloc(a.name, a.nbytes, slots.get(a.name, "")) for a in allocs])
            action = msgspec.structs.replace(action, allocs=allocs)
        self.actions.append(action)
        return len(self.actions) - 1

    @property
    def position(self) -> Position:
        """The position of the next action."""
        return Position(len(self.actions), self._events)

    def begin_unit(self) -> None:
        """Note that the next unit begins."""
        self.unit_starts.append(self.position)

    def rewrite(self, start: Position, actions: Sequence[Action], events: int) -> None:
        """Replace all actions from `start` to the end by `actions`, which record `events` more
        events."""
        self.actions[start.action :] = actions
        self._events += events

    def new_event(self) -> str:
        self._events += 1
        return local_event(self._events - 1)

    def mark(self, stream: str) -> str:
        """Return an event that is recorded when all work issued so far on `stream` is done."""
        for index in range(len(self.actions) - 1, -1, -1):
            action = self.actions[index]
            if action.stream == stream and action.kind not in UNTIMED:
                if not action.event:
                    action = msgspec.structs.replace(action, event=self.new_event())
                    self.actions[index] = action
                return action.event
        event = self.new_event()
        self.add(Action(kind=Kind.EVENT, stream=stream, event=event))
        return event

    def mark_begin(self, index: int) -> str:
        """Return an event that is recorded when the action at `index` starts."""
        action = self.actions[index]
        if not action.begin:
            action = msgspec.structs.replace(action, begin=self.new_event())
            self.actions[index] = action
        return action.begin

    def wait(self, stream: str, event: str) -> None:
        self.actions.append(Action(kind=WAIT, stream=stream, wait=event))

    def compute(
        self,
        kind: Kind,
        part: str,
        op: Op,
        reads: list[str],
        allocs: list[Alloc],
        *,
        variant: int = 0,
        share: Share = WHOLE,
        overlaps: str = "",
    ) -> int:
        """Append a forward, backward or recomputation on the compute stream, and return its
        index."""
        forward = kind in FORWARD_KINDS
        scratch = op.scratch_forward_bytes if forward else op.scratch_backward_bytes
        if self.parameters and op.parameters and part in self.parameters:
            weights = self.parameters[part]
            own = (name for name in weights if is_expert_buffer(name) == op.of_experts)
            reads = [*reads, *own]
        if self.weights is not None and op.parameters:
            reads = [*reads, *self.weights(self, part, op)]
        return self.add(
            Action(
                kind=kind,
                stream=COMPUTE,
                part=part,
                op=op.name,
                reads=tuple(dict.fromkeys(reads)),
                allocs=tuple(allocs),
                fraction=share.fraction,
                offset=share.offset,
                overlaps=overlaps,
                scratch=int(scratch * share.fraction),
                variant=variant,
            )
        )

    def stall(self, comm: Comm) -> None:
        """Append a STALL: the time by which a collective slows compute, because they share SMs."""
        self.add(Action(kind=Kind.STALL, stream=COMPUTE, op=STALL, comm=comm))

    def state_copy(
        self,
        kind: Kind,
        part: str,
        op: str,
        nbytes: int,
        *,
        after: str,
        reads: tuple[str, ...] = (),
        allocs: tuple[Alloc, ...] = (),
        units: tuple[str, ...] = (),
    ) -> str:
        """Append a copy of states between device and host that starts after event `after`, and
        return its end event.  States have resident memory in host memory; `allocs` is a buffer on
        the device, if they have none there."""
        stream = "d2h" if kind is Kind.D2H else "h2d"
        self.wait(stream, after)
        event = self.new_event()
        self.add(
            Action(
                kind=kind,
                stream=stream,
                part=part,
                op=op,
                reads=reads,
                allocs=allocs,
                nbytes=nbytes,
                event=event,
                units=units,
            )
        )
        return event

    def collective(
        self,
        comm: Comm,
        part: str,
        op: str,
        reads: list[str],
        allocs: list[Alloc],
        share: Share = WHOLE,
        *,
        after: str = "",
    ) -> str:
        """Append a collective on its group's stream, after the compute issued so far (or after
        event `after`), and return its end event.  A share of the rows moves the same share of the
        payload."""
        if share.fraction != 1.0:
            comm = Comm(comm.kind, comm.group, int(comm.nbytes * share.fraction))
        self.wait(comm.stream, after or self.mark(COMPUTE))
        event = self.new_event()
        self.add(
            Action(
                kind=COMM_KIND[comm.kind],
                stream=comm.stream,
                part=part,
                op=op,
                reads=tuple(reads),
                allocs=tuple(allocs),
                event=event,
                fraction=share.fraction,
                offset=share.offset,
                comm=comm,
            )
        )
        return event

    def run_beside(self, variant: int) -> None:
        """Mark the collective just appended, an all-to-all of experts in a layer of kind `variant`:
        it runs beside a pass of another micro-batch, if one runs beside the block."""
        if self.beside:
            found = msgspec.structs.replace(self.actions[-1], beside=self.beside, variant=variant)
            self.actions[-1] = found

    def repeat(self, piece: RepeatedPiece) -> None:
        """Note a piece that stands for further pieces.  Write all pieces if the block is not
        compact."""
        self._repeated.append(piece)
        if not self.compact:
            self._write_out(piece)

    def _write_out(self, piece: RepeatedPiece) -> None:
        """Write the actions of all pieces that a piece stands for."""
        start, end = piece.start.action, piece.end.action
        body = self.actions[start:end]
        more = [action for shift in piece.periods.shifts for action in shift.of(body)]
        self.actions[end:end] = more
        others = [each for each in self._repeated if each is not piece]
        self._repeated = [each.after_insert(end, len(more)) for each in others]
        self.unit_starts = [each.after_insert(end, len(more)) for each in self.unit_starts]

    def finish(self, label: str, survivors: set[str], arrivals: set[str]) -> Block:
        """Return the block: its actions with a FREE behind each tensor's last reader
        (`liveness.freed`).  `unit_starts` then count the FREEs too.  If a piece does not free the
        same tensors as the piece before it, all pieces are written."""
        frees = frees_by_action(self.actions, survivors, arrivals)
        ends: dict[int, set[str]] = defaultdict(
            set
        )  # tensors that pieces free, by number of pieces
        for piece in self._repeated:
            ends[piece.periods.times] |= piece.deaths(self.actions, frees)
        for piece in self._repeated:
            if not piece.frees_alike(self.actions, frees, survivors | ends[piece.periods.times]):
                self._write_out(piece)
                return self.finish(label, survivors, arrivals)
        for piece in self._repeated:
            piece.remove_later_deaths(self.actions, frees)
        out: list[Action] = []
        inserted, done = sorted(frees), 0
        for index in inserted:
            out += self.actions[done : index + 1]
            out.append(free_action(frees[index]))
            done = index + 1
        out += self.actions[done:]

        def moved(place: Position) -> Position:
            return Position(place.action + bisect_left(inserted, place.action), place.event)

        self.unit_starts = [moved(place) for place in self.unit_starts]
        periods = [piece.finished(moved, frees) for piece in self._repeated]
        return Block(label, tuple(out), tuple(periods))
