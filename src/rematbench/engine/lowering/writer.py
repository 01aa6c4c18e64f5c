"""Writes the actions of one block: events, waits, collectives, and frees derived from liveness."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rematbench.costs.operators.ops import Comm, Op
from rematbench.engine.lowering.liveness import free, freed
from rematbench.engine.lowering.repeated_pieces import Again, Place
from rematbench.engine.program.action import (
    COMM_KIND,
    COMPUTE,
    STALL,
    Action,
    Alloc,
    Kind,
    local_event,
)
from rematbench.engine.program.program import Block

# Looking up an Enum's member takes as long as the rest of a line, and every action asks for these.
WAIT, UNTIMED, AHEAD = Kind.WAIT, (Kind.FREE, Kind.ALLOC), (Kind.FORWARD, Kind.RECOMPUTE)


class Share(NamedTuple):
    """The rows an action works on, as shares of its operator's rows."""

    fraction: float
    offset: float = 0.0


WHOLE = Share(1.0)


class BlockWriter:
    """Collects a block's actions in issue order; its events are local to the block.  `places`:
    where each unit begins; `compact`: whether a piece may stand for further pieces."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.parameters: dict[str, tuple[str, ...]] = {}  # gathered copies, by part that reads them
        self.slots: dict[str, str] = {}  # storage -> staging slot
        self.places: list[Place] = []
        self.compact = True
        self._again: list[Again] = []
        self._events = 0

    def add(self, action: Action) -> int:
        """Append an action; returns its index."""
        slots, allocs = self.slots, action.allocs
        if slots and allocs and any([alloc.name in slots for alloc in allocs]):
            allocs = tuple([Alloc(a.name, a.nbytes, slots.get(a.name, "")) for a in allocs])
            action = msgspec.structs.replace(action, allocs=allocs)
        self.actions.append(action)
        return len(self.actions) - 1

    @property
    def here(self) -> Place:
        """Where the next action is written."""
        return Place(len(self.actions), self._events)

    def begin_unit(self) -> None:
        """Note that the next unit begins."""
        self.places.append(self.here)

    def rewrite(self, start: Place, actions: Sequence[Action], events: int) -> None:
        """Put `actions` in place of all from `start` on; they record `events` more events."""
        self.actions[start.action :] = actions
        self._events += events

    def new_event(self) -> str:
        self._events += 1
        return local_event(self._events - 1)

    def mark(self, stream: str) -> str:
        """An event that is recorded when all work issued so far on `stream` is done."""
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
        """An event that is recorded when the action at `index` starts."""
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
        beside: str = "",
    ) -> int:
        """Append a forward, backward or recomputation on the compute stream; returns its index."""
        forward = kind in AHEAD
        scratch = op.scratch_forward_bytes if forward else op.scratch_backward_bytes
        if self.parameters and op.parameters and part in self.parameters:
            reads = [*reads, *self.parameters[part]]
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
                beside=beside,
                scratch=int(scratch * share.fraction),
                variant=variant,
            )
        )

    def stall(self, comm: Comm) -> None:
        """Append a STALL: the time that a collective takes from compute beside it (shared SMs)."""
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
    ) -> str:
        """Append a copy of states between device and host that starts after event `after`; returns
        its end event.  States have resident memory on both sides, so nothing is allocated."""
        stream = "d2h" if kind is Kind.D2H else "h2d"
        self.wait(stream, after)
        event = self.new_event()
        self.add(
            Action(
                kind=kind, stream=stream, part=part, op=op, reads=reads, nbytes=nbytes, event=event
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
        event `after`); returns its end event.  A share of the rows moves that share of the
        payload."""
        if share.fraction != 1.0:
            comm = Comm(comm.kind, comm.group, int(comm.nbytes * share.fraction))
        self.wait(comm.group, after or self.mark(COMPUTE))
        event = self.new_event()
        self.add(
            Action(
                kind=COMM_KIND[comm.kind],
                stream=comm.group,
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

    def repeat(self, again: Again) -> None:
        """Note a piece that stands for others; write these where the block is not compact."""
        self._again.append(again)
        if not self.compact:
            self._write_out(again)

    def _write_out(self, again: Again) -> None:
        """Write the actions of all pieces that a piece stands for."""
        start, end = again.start.action, again.end.action
        body = self.actions[start:end]
        more = [action for shift in again.periods.shifts for action in shift.of(body)]
        self.actions[end:end] = more
        others = [each for each in self._again if each is not again]
        self._again = [each.behind(end, len(more)) for each in others]
        self.places = [each.behind(end, len(more)) for each in self.places]

    def finish(self, label: str, survivors: set[str], arrivals: set[str]) -> Block:
        """The block: its actions with a FREE behind each tensor's last reader (`liveness.freed`).
        `places` then count the FREEs too.  A piece whose tensors are not freed as those of the
        piece before is written out."""
        frees = freed(self.actions, survivors, arrivals)
        ends: dict[int, set[str]] = defaultdict(set)  # what as many pieces free, each in its turn
        for again in self._again:
            ends[again.periods.times] |= again.deaths(self.actions, frees)
        for again in self._again:
            if not again.alike(self.actions, frees, survivors | ends[again.periods.times]):
                self._write_out(again)
                return self.finish(label, survivors, arrivals)
        for again in self._again:
            again.take_deaths(self.actions, frees)
        out: list[Action] = []
        inserted, done = sorted(frees), 0
        for index in inserted:
            out += self.actions[done : index + 1]
            out.append(free(frees[index]))
            done = index + 1
        out += self.actions[done:]

        def moved(place: Place) -> Place:
            return Place(place.action + bisect_left(inserted, place.action), place.event)

        self.places = [moved(place) for place in self.places]
        periods = [again.finished(moved, frees) for again in self._again]
        return Block(label, tuple(out), tuple(periods))
