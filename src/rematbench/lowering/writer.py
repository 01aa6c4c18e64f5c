"""Writes the actions of one block: events, waits, collectives, and frees derived from liveness."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rematbench.operators.ops import Comm, Op
from rematbench.program.action import COMM_KIND, STALL, Action, Alloc, Kind, by_number, local_event

COMPUTE = "compute"


class Share(NamedTuple):
    """The rows an action works on, as shares of its operator's rows."""

    fraction: float
    offset: float = 0.0


WHOLE = Share(1.0)


class Place(NamedTuple):
    """Where a unit begins in a block: the index of its first action, the number of its first
    event."""

    action: int
    event: int


class BlockWriter:
    """Collects a block's actions in issue order; its events are local to the block.  `places`:
    where each unit begins."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.parameters: dict[str, tuple[str, ...]] = {}  # gathered copies, by part that reads them
        self.slots: dict[str, str] = {}  # storage -> staging slot
        self.places: list[Place] = []
        self._events = 0

    def add(self, action: Action) -> int:
        """Append an action; returns its index."""
        if self.slots and any(alloc.name in self.slots for alloc in action.allocs):
            slots = self.slots
            allocs = tuple(Alloc(a.name, a.nbytes, slots.get(a.name, "")) for a in action.allocs)
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
            if action.stream == stream and action.kind not in (Kind.FREE, Kind.ALLOC):
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
        self.add(Action(kind=Kind.WAIT, stream=stream, wait=event))

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
        forward = kind in (Kind.FORWARD, Kind.RECOMPUTE)
        scratch = op.scratch_forward_bytes if forward else op.scratch_backward_bytes
        if op.parameters and part in self.parameters:
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

    def finish(self, survivors: set[str], arrivals: set[str]) -> tuple[Action, ...]:
        """The block's actions, with a FREE inserted after each tensor's last reader.

        `survivors` outlive the block; `arrivals` are alive when the block starts.  A tensor read by
        another stream is freed where the compute stream has waited for that stream.  A temporary of
        an operator that is recomputed twice has two lifetimes under one name.  `places` then count
        the FREEs too.
        """
        frees: dict[int, list[str]] = {}
        for at, name in self._ends(survivors, arrivals):
            frees.setdefault(at, []).append(name)
        out: list[Action] = []
        for index, action in enumerate(self.actions):
            out.append(action)
            if index in frees:
                names = frees[index]
                if len(names) > 1:
                    names.sort(key=by_number)
                out.append(Action(kind=Kind.FREE, stream=COMPUTE, frees=tuple(names)))
        inserted = sorted(frees)
        self.places = [
            Place(p.action + bisect_left(inserted, p.action), p.event) for p in self.places
        ]
        return tuple(out)

    def _ends(self, survivors: set[str], arrivals: set[str]) -> list[tuple[int, str]]:
        """(index of the action after which a tensor is freed, its name) of every lifetime that ends
        in the block."""
        waited, begun = self._waits()
        end = len(self.actions) - 1
        last: dict[str, int] = {}
        earlier: list[tuple[int, str]] = []
        born = set(arrivals)
        for index, action in enumerate(self.actions):
            allocs, reads = action.allocs, action.reads
            if allocs or reads:
                if action.stream != COMPUTE:
                    safe = waited[index]
                else:  # not before a collective beside the kernel has allocated its output
                    safe = begun.get(action.begin, index) if action.begin else index
                for alloc in allocs:
                    if alloc.name in born and alloc.name in last:
                        earlier.append((last[alloc.name], alloc.name))
                    born.add(alloc.name)
                    last[alloc.name] = safe
                for name in reads:
                    if last.get(name, -1) < safe:
                        last[name] = safe
            if action.frees:
                born.difference_update(action.frees)
        return [*earlier, *((last.get(name, end), name) for name in born - survivors)]

    def _waits(self) -> tuple[list[int], dict[str, int]]:
        """For each action of another stream, the index where compute has waited for it: for its own
        event or for the event of a later action of that stream (a stream runs in order); the last
        index if nowhere.  And by event that another stream waits for, the index after the wait."""
        end = len(self.actions) - 1
        on_compute: dict[str, int] = {}
        elsewhere: dict[str, int] = {}
        soonest: dict[str, int] = {}
        table = [end] * len(self.actions)
        for index in range(end, -1, -1):
            action = self.actions[index]
            stream = action.stream
            if stream == COMPUTE:
                if action.kind is Kind.WAIT:
                    on_compute.setdefault(action.wait, index)
                continue
            if action.kind is Kind.WAIT:
                elsewhere.setdefault(action.wait, index + 1)
            waited = on_compute.get(action.event, end) if action.event else end
            if waited < soonest.get(stream, end):
                soonest[stream] = waited
            table[index] = soonest.get(stream, end)
        return table, elsewhere
