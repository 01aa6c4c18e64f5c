"""Blocks compiled for the chunk level: consecutive kernels on a stream become one row.

Only the first action of a row waits for an event, and only the last action records an event, so no
other action can run between them. Let the kernels of a row take d1, d2, ... seconds and the host
h1, h2, ... seconds to issue them. Then the row ends d1 + d2 + ... after its start. Kernel j starts
no earlier than the host's clock before the row + h1 + ... + hj. So the row starts no earlier than
that clock + the largest (h1 + ... + hj) - (d1 + ... + d(j-1)). The times of a row are exactly those
of its single actions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from rematbench.engine.program.action import STREAM_INDEX, STREAMS, Action, Kind
from rematbench.engine.program.program import Block, Part, Periods
from rematbench.engine.program.storage import Event
from rematbench.engine.simulate.op_level import TIMELESS, Timing

SEND = Kind.SEND  # A module variable, because a lookup in an Enum is slow.
NO_STREAM = -1
NEVER = float("-inf")
"""The identity of max: a time before every time."""


class Row(NamedTuple):
    """Consecutive actions on a stream. `seconds`: time on the stream; `issue`: time of the host;
    `late`: seconds from the host's clock before the row to the earliest start that the host's
    issuing allows. `held`: whether the host waits for the row's end. `wait`, `begin`, `event`: the
    event that the row waits for, and the events of its start and its end. `send`: a message's
    direction."""

    stream: int
    seconds: float
    issue: float
    late: float
    held: bool
    wait: Event | None
    begin: Event | None
    event: Event | None
    send: str


Time = TypeVar("Time")
Carried = tuple[tuple[Event, Event], ...]
"""Pairs (new, old): rows wait for the new event, which earlier rows record under the old name."""


class RowPart(NamedTuple):
    """Rows of a block in order, or parts inside it, which occur `times` times. `carried`: events
    that are renamed before the rows run, because all periods of a block share the rows."""

    rows: tuple[Row, ...]
    carried: Carried = ()
    times: int = 1
    inside: tuple["RowPart", ...] = ()

    def old_events(self) -> Iterator[Event]:
        yield from (old for _, old in self.carried)
        for part in self.inside:
            yield from part.old_events()

    def renamed(self, seen: Mapping[Event, Time]) -> dict[Event, Time]:
        return {event: seen[before] for event, before in self.carried}


class RowBlock(NamedTuple):
    """A compiled block: its rows in parts; the events of messages for which it waits; the events
    for which other blocks may wait; and the seconds for which it keeps each stream busy."""

    parts: tuple[RowPart, ...]
    receives: tuple[Event, ...]
    shared: tuple[Event, ...]
    busy_s: tuple[float, ...]


def rows_with(
    block: Block,
    rank: int,
    timing: Callable[[Action, int], Timing],
    timed: list[Timing] | None = None,
) -> RowBlock:
    """Compile a block into rows with the timings of its actions; append these timings to `timed`.
    Each period is compiled only once."""
    timed = [] if timed is None else timed
    if block.periods:
        parts, busy = _parts(block.parts, rank, timing, timed)
        rows = [*_all_rows(parts)]
    else:
        rows, busy = _rows(block.written, rank, timing, timed)
        parts = [RowPart(tuple(rows))]
    waits, events = dict.fromkeys([r.wait for r in rows]), dict.fromkeys([r.event for r in rows])
    receives = tuple([event for event in waits if event is not None and event.message])
    shared = tuple([event for event in events if event is not None and not event.is_local])
    return RowBlock(tuple(parts), receives, shared, tuple(busy))


def _parts(
    parts: Sequence[Part], rank: int, timing: Callable[[Action, int], Timing], timed: list[Timing]
) -> tuple[list[RowPart], list[float]]:
    found: list[tuple[list[RowPart], list[float]]] = []
    for part in parts:
        if part.periods:
            found.append(_parts(part.inside, rank, timing, timed))
        else:
            rows, busy_s = _rows(part.written, rank, timing, timed)
            found.append(([RowPart(tuple(rows))], busy_s))
    rest: list[RowPart] = []
    busy = [0.0] * len(STREAMS)
    for part, (own, busy_s) in zip(reversed(parts), reversed(found), strict=True):
        if part.periods:
            between, behind = _carried(own, rest, part.periods)
            if rest:
                rest[0] = rest[0]._replace(carried=(*behind, *rest[0].carried))
            alone = own[0].rows if len(own) == 1 else ()
            again = RowPart(alone, between, part.times - 1, () if alone else tuple(own))
            rest.insert(0, again)
        rest = [*own, *rest]
        busy = [known + part.times * more for known, more in zip(busy, busy_s, strict=True)]
    return rest, busy


def _all_rows(parts: Iterable[RowPart]) -> Iterator[Row]:
    for part in parts:
        yield from part.rows
        yield from _all_rows(part.inside)


def _carried(
    period: Sequence[RowPart], rest: Sequence[RowPart], periods: Periods
) -> tuple[Carried, Carried]:
    """The events to rename from period to period, and from the last period to the rest of the
    block. All periods use the event names of the first period. So event number n of a period has
    number n + `events` one period earlier; if that period does not record it, an earlier one
    does."""
    recorded = {event for row in _all_rows(period) for event in (row.begin, row.event)}
    events, back = periods.events, (periods.times - 1) * periods.events
    awaited = [event for event in _awaited(rest) if event.number >= periods.event]
    behind = [(event, event.later(-back)) for event in awaited]
    between: dict[Event, Event] = {}
    for wanted in [*_awaited(period), *(before for _, before in behind)]:
        event = wanted
        for _ in range(periods.times):
            if event in recorded or event in between:
                break
            between[event] = event.later(events)
            event = between[event]
    return tuple(between.items()), tuple(behind)


def _awaited(parts: Sequence[RowPart]) -> list[Event]:
    """The local events that parts wait for and that no earlier action of the parts records."""
    found: dict[Event, None] = {}
    _look(parts, set(), found)
    return [*found]


def _look(parts: Sequence[RowPart], known: set[Event | None], found: dict[Event, None]) -> None:
    for part in parts:
        for event, before in part.carried:
            if before not in known and before.is_local:
                found[before] = None
            known.add(event)
        for row in part.rows:
            if row.wait and row.wait not in known and row.wait.is_local:
                found[row.wait] = None
            known.update((row.begin, row.event))
        _look(part.inside, known, found)


def _rows(
    actions: Sequence[Action],
    rank: int,
    timing: Callable[[Action, int], Timing],
    timed: list[Timing],
) -> tuple[list[Row], list[float]]:
    """The rows of some actions, and the seconds for which they keep each stream busy.  The loop is
    plain because every simulation spends its time here."""
    rows: list[Row] = []
    busy = [0.0] * len(STREAMS)
    wait: Event | None = None
    begin: Event | None = None
    open_stream, total, issued, late = NO_STREAM, 0.0, 0.0, NEVER
    for action in actions:
        if action.kind in TIMELESS:
            continue
        taken, issue, held = found = timing(action, rank)
        timed.append(found)
        stream = STREAM_INDEX[action.stream]
        busy[stream] += taken
        before, starts = action.wait, action.exchange.begin
        if stream != open_stream or before or starts:
            if open_stream != NO_STREAM:
                row = Row(open_stream, total, issued, late, False, wait, begin, None, "")
                rows.append(row)
            open_stream, total, issued, late = stream, 0.0, 0.0, NEVER
            wait, begin = before, starts
        if issue:
            issued += issue
            late = max(late, issued - total)
        total += taken
        event, send = action.event, action.op if action.kind is SEND else ""
        if event or held or send or begin:
            rows.append(Row(open_stream, total, issued, late, held, wait, begin, event, send))
            open_stream = NO_STREAM
    if open_stream != NO_STREAM:
        rows.append(Row(open_stream, total, issued, late, False, wait, begin, None, ""))
    return rows, busy
