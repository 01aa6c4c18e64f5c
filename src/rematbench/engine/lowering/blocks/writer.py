"""Writes the actions of a block: events, waits, collectives, and frees after the last readers."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from rematbench.costs.operators.ops import Comm, Op
from rematbench.engine.lowering.blocks.liveness import free_action, frees_by_action
from rematbench.engine.lowering.blocks.repeated_pieces import Position, RepeatedPiece
from rematbench.engine.program.action import (
    ALONE,
    COMM_KIND,
    COMPUTE,
    STALL,
    WHOLE,
    Action,
    Alloc,
    Exchange,
    Kind,
    Rows,
)
from rematbench.engine.program.program import Block
from rematbench.engine.program.storage import (
    EXPERTS,
    NO_PART,
    Event,
    ModelPart,
    Slot,
    Storage,
    local_event,
)

# Module variables, because a lookup in an Enum is slow and every action needs these.
WAIT, UNTIMED, FORWARD_KINDS = Kind.WAIT, (Kind.FREE, Kind.ALLOC), (Kind.FORWARD, Kind.RECOMPUTE)


WeightReader = Callable[["BlockWriter", ModelPart, Op], tuple[Storage, ...]]
"""(writer, part, operator) -> storages of weights that a kernel reads, gathered if necessary."""


class BlockWriter:
    """Collects a block's actions in issue order. `unit_starts`: where each unit begins; `compact`:
    whether one piece may stand for later pieces too."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.parameters: dict[ModelPart, tuple[Storage, ...]] = {}  # gathered copies by unit
        self.weights: WeightReader | None = None
        self.slots: dict[Storage, Slot] = {}
        self.beside = ""  # the pass of another micro-batch that overlaps the block
        self.unit_starts: list[Position] = []
        self.compact = True
        self._repeated: list[RepeatedPiece] = []
        self._events = 0

    def add(self, action: Action) -> int:
        slots, allocs = self.slots, action.allocs
        if slots and allocs and any([alloc.storage in slots for alloc in allocs]):
            allocs = tuple([Alloc(a.storage, a.nbytes, slots.get(a.storage)) for a in allocs])
            action = replace(action, allocs=allocs)
        self.actions.append(action)
        return len(self.actions) - 1

    @property
    def position(self) -> Position:
        return Position(len(self.actions), self._events)

    def begin_unit(self) -> None:
        self.unit_starts.append(self.position)

    def rewrite(self, start: Position, actions: Sequence[Action], events: int) -> None:
        """Replace all actions from `start` on by `actions`, and raise the number of the next event
        by `events`."""
        self.actions[start.action :] = actions
        self._events += events

    def new_event(self) -> Event:
        self._events += 1
        return local_event(self._events - 1)

    def mark(self, stream: str) -> Event:
        """Return an event that is recorded when all work issued on `stream` so far is done."""
        for index in range(len(self.actions) - 1, -1, -1):
            action = self.actions[index]
            if action.stream == stream and action.kind not in UNTIMED:
                if action.event is not None:
                    return action.event
                event = self.new_event()
                self.actions[index] = replace(action, event=event)
                return event
        event = self.new_event()
        self.add(Action(kind=Kind.EVENT, stream=stream, event=event))
        return event

    def mark_begin(self, index: int) -> Event:
        """Return an event that is recorded when the action at `index` starts."""
        begin = self.actions[index].exchange.begin
        if begin is None:
            begin = self.new_event()
            self._exchange(index, begin=begin)
        return begin

    def _exchange(self, index: int, **changes: Event | str) -> None:
        action = self.actions[index]
        exchange = replace(action.exchange, **changes)
        self.actions[index] = replace(action, exchange=exchange)

    def wait(self, stream: str, event: Event) -> None:
        self.actions.append(Action(kind=WAIT, stream=stream, wait=event))

    def free(self, *storages: Storage) -> None:
        self.add(Action(kind=Kind.FREE, stream=COMPUTE, frees=storages))

    def move(
        self,
        kind: Kind,
        storage: Storage,
        reads: tuple[Storage, ...],
        allocs: tuple[Alloc, ...],
        nbytes: int = 0,
        *,
        stream: str = COMPUTE,
        event: Event | None = None,
    ) -> None:
        """Append an action that moves or allocates a storage, under the storage's name."""
        gradient = storage.is_gradient
        self.add(
            Action(
                kind=kind,
                stream=stream,
                part=NO_PART if gradient else storage.part,
                op=storage.text if gradient else storage.label,
                reads=reads,
                allocs=allocs,
                nbytes=nbytes,
                event=event,
            )
        )

    def compute(
        self,
        kind: Kind,
        part: ModelPart,
        variant: int,
        op: Op,
        reads: list[Storage],
        allocs: list[Alloc],
        *,
        rows: Rows = WHOLE,
        overlaps: str = "",
    ) -> int:
        forward = kind in FORWARD_KINDS
        scratch = op.scratch_forward_bytes if forward else op.scratch_backward_bytes
        widened = 0 if kind is Kind.BACKWARD_WEIGHT else op.widened_bytes[not forward]
        if self.parameters and op.parameters and part in self.parameters:
            weights = self.parameters[part]
            own = (each for each in weights if (each.tensor == EXPERTS) == op.of_experts)
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
                rows=rows,
                exchange=Exchange(overlaps=overlaps) if overlaps else ALONE,
                scratch=max(int(scratch * rows.fraction), widened),
                variant=variant,
            )
        )

    def stall(self, comm: Comm) -> None:
        """Append a STALL: the time by which a collective slows compute, as both use the GPU's
        SMs."""
        self.add(Action(kind=Kind.STALL, stream=COMPUTE, op=STALL, exchange=Exchange(comm)))

    def state_copy(
        self,
        kind: Kind,
        part: ModelPart,
        op: str,
        nbytes: int,
        *,
        after: Event,
        reads: tuple[Storage, ...] = (),
        allocs: tuple[Alloc, ...] = (),
    ) -> Event:
        """Append a copy of states between device and host that starts after event `after`; return
        its end event. States in host memory are resident. `allocs`: a new buffer on the device, for
        states that have no memory there."""
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
            )
        )
        return event

    def collective(
        self,
        comm: Comm,
        part: ModelPart,
        op: str,
        reads: list[Storage],
        allocs: list[Alloc],
        rows: Rows = WHOLE,
        *,
        after: Event | None = None,
    ) -> Event:
        """Append a collective on its group's stream, after the compute issued so far (or after
        event `after`); return its end event. For a share of the rows, it moves the same share of
        its payload."""
        if rows.fraction != 1.0:
            comm = Comm(comm.kind, comm.group, int(comm.nbytes * rows.fraction))
        self.wait(comm.stream, after or self.mark(COMPUTE))
        return self.issue(comm, part, op, reads, allocs, rows)

    def issue(
        self,
        comm: Comm,
        part: ModelPart,
        op: str,
        reads: Sequence[Storage],
        allocs: Sequence[Alloc] = (),
        rows: Rows = WHOLE,
        event: Event | None = None,
    ) -> Event:
        """Append a collective on its group's stream; return its end event: `event`, or a new
        one."""
        event = event or self.new_event()
        self.add(
            Action(
                kind=COMM_KIND[comm.kind],
                stream=comm.stream,
                part=part,
                op=op,
                reads=tuple(reads),
                allocs=tuple(allocs),
                event=event,
                rows=rows,
                exchange=Exchange(comm),
            )
        )
        return event

    def run_beside(self, variant: int) -> None:
        """If a pass of another micro-batch overlaps the block, mark that the collective appended
        last (an all-to-all of experts, in a layer of kind `variant`) runs beside it."""
        if self.beside:
            self.actions[-1] = replace(self.actions[-1], variant=variant)
            self._exchange(-1, beside=self.beside)

    def repeat(self, piece: RepeatedPiece) -> None:
        """Record that a piece stands for later pieces; if the block is not compact, write these."""
        self._repeated.append(piece)
        if not self.compact:
            self._write_out(piece)

    def _write_out(self, piece: RepeatedPiece) -> None:
        start, end = piece.start.action, piece.end.action
        body = self.actions[start:end]
        more = [action for shift in piece.periods.shifts for action in shift.of(body)]
        self.actions[end:end] = more
        others = [each for each in self._repeated if each is not piece]
        self._repeated = [each.after_insert(end, len(more)) for each in others]
        self.unit_starts = [each.after_insert(end, len(more)) for each in self.unit_starts]

    def finish(self, label: str, survivors: set[Storage], arrivals: set[Storage]) -> Block:
        """Return the block: its actions, with a FREE after each tensor's last reader
        (`frees_by_action`); `unit_starts` then count the FREEs too. If a repeated piece does not
        free the same tensors as the piece before it, all its pieces are written."""
        frees = frees_by_action(self.actions, survivors, arrivals)
        # The tensors that pieces free, by the number of pieces.
        ends: dict[int, set[Storage]] = defaultdict(set)
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
