"""Blocks compiled for the chunk level: consecutive kernels on a stream become one row.

Only the first action of a row waits for an event, and only the last action records an event, so no
other action can run between them.  Let the kernels of a row take d1, d2, ... and their issues by
the host h1, h2, ...  Then the row ends d1 + d2 + ... after its start.  Kernel j starts no earlier
than the host's clock before the row + h1 + ... + hj.  So the row starts no earlier than that clock
+ the largest (h1 + ... + hj) - (d1 + ... + d(j-1)).  The row is as exact as its single actions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from rematbench.engine.program.action import (
    STREAM_INDEX,
    STREAMS,
    Action,
    Kind,
    event_number,
    is_local,
    later_event,
)
from rematbench.engine.program.program import Block, Part, Periods
from rematbench.engine.simulate.op_level import TIMELESS, Timing

SEND = Kind.SEND  # a local, because a lookup in an Enum is slow
NO_STREAM = -1
NEVER = float("-inf")
"""The identity of max: a time before every time."""


class Row(NamedTuple):
    """Consecutive actions on a stream.  `seconds`: time on the stream; `issue`: time of the host;
    `late`: seconds from the host's clock before the row to the earliest start that the host allows,
    as if all waits for the host came first.  `held`: whether the host waits for the row's end.
    `wait`, `begin`, `event`: the event that the row waits for, and the events of its start and of
    its end.  `send`: the direction of a message."""

    stream: int
    seconds: float
    issue: float
    late: float
    held: bool
    wait: str
    begin: str
    event: str
    send: str


Time = TypeVar("Time")
Carried = tuple[tuple[str, str], ...]
"""(new name, old name) of events that rows wait for and that earlier rows record under the old
name."""


class RowPart(NamedTuple):
    """Rows of a block in order, or parts that occur `times` times.  `carried`: events of the block
    that are renamed before the rows, because the periods of a block share their rows."""

    rows: tuple[Row, ...]
    carried: Carried = ()
    times: int = 1
    inside: tuple["RowPart", ...] = ()

    def old_names(self) -> Iterator[str]:
        """The old names of all events that are renamed."""
        yield from (old for _, old in self.carried)
        for part in self.inside:
            yield from part.old_names()

    def renamed(self, seen: Mapping[str, Time]) -> dict[str, Time]:
        """Return the renamed events of `seen`, by new name."""
        return {name: seen[before] for name, before in self.carried}


class RowBlock(NamedTuple):
    """A compiled block: its rows in parts, the events of messages for which it waits, the events
    for which another block may wait, and the seconds during which it keeps each stream busy."""

    parts: tuple[RowPart, ...]
    receives: tuple[str, ...]
    shared: tuple[str, ...]
    busy_s: tuple[float, ...]


def rows_with(
    block: Block,
    rank: int,
    timing: Callable[[Action, int], Timing],
    timed: list[Timing] | None = None,
) -> RowBlock:
    """Compile a block into rows with the timings of its actions, and append these timings to
    `timed`.  Each period is compiled once."""
    timed = [] if timed is None else timed
    if block.periods:
        parts, busy = _parts(block.parts, rank, timing, timed)
        rows = [*_all_rows(parts)]
    else:
        rows, busy = _rows(block.written, rank, timing, timed)
        parts = [RowPart(tuple(rows))]
    waits, events = dict.fromkeys([r.wait for r in rows]), dict.fromkeys([r.event for r in rows])
    receives = tuple([name for name in waits if name.startswith("recv_")])
    shared = tuple([name for name in events if name and not is_local(name)])
    return RowBlock(tuple(parts), receives, shared, tuple(busy))


def _parts(
    parts: Sequence[Part],
    rank: int,
    timing: Callable[[Action, int], Timing],
    timed: list[Timing],
) -> tuple[list[RowPart], list[float]]:
    """Compiled parts, and the seconds in which they keep each stream busy."""
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
    """The events that are renamed from period to period, and from the last period to the rest of
    the block.  The events of each period have the names of the first period.  So event number n of
    a period is number n + `events` one period earlier; if that period does not record the event, an
    earlier period does."""
    recorded = {name for row in _all_rows(period) for name in (row.begin, row.event)}
    events, back = periods.events, (periods.times - 1) * periods.events
    awaited = [name for name in _awaited(rest) if event_number(name) >= periods.event]
    behind = [(name, later_event(name, -back)) for name in awaited]
    between: dict[str, str] = {}
    for wanted in [*_awaited(period), *(before for _, before in behind)]:
        name = wanted
        for _ in range(periods.times):
            if name in recorded or name in between:
                break
            between[name] = later_event(name, events)
            name = between[name]
    return tuple(between.items()), tuple(behind)


def _awaited(parts: Sequence[RowPart]) -> list[str]:
    """The local events that parts wait for before an action of the parts records them."""
    found: dict[str, None] = {}
    _look(parts, set(), found)
    return [*found]


def _look(parts: Sequence[RowPart], known: set[str], found: dict[str, None]) -> None:
    for part in parts:
        for name, before in part.carried:
            if before not in known and is_local(before):
                found[before] = None
            known.add(name)
        for row in part.rows:
            if row.wait and row.wait not in known and is_local(row.wait):
                found[row.wait] = None
            known.update((row.begin, row.event))
        _look(part.inside, known, found)


def _rows(
    actions: Sequence[Action],
    rank: int,
    timing: Callable[[Action, int], Timing],
    timed: list[Timing],
) -> tuple[list[Row], list[float]]:
    """The rows of some actions, and the seconds in which they keep each stream busy.  The loop is
    plain because every simulation spends its time here."""
    rows: list[Row] = []
    busy = [0.0] * len(STREAMS)
    open_stream, total, issued, late, wait, begin = NO_STREAM, 0.0, 0.0, NEVER, "", ""
    for action in actions:
        if action.kind in TIMELESS:
            continue
        taken, issue, held = found = timing(action, rank)
        timed.append(found)
        stream = STREAM_INDEX[action.stream]
        busy[stream] += taken
        if stream != open_stream or action.wait or action.begin:
            if open_stream != NO_STREAM:
                row = Row(open_stream, total, issued, late, False, wait, begin, "", "")
                rows.append(row)
            open_stream, total, issued, late = stream, 0.0, 0.0, NEVER
            wait, begin = action.wait, action.begin
        if issue:
            issued += issue
            late = max(late, issued - total)
        total += taken
        event, send = action.event, action.op if action.kind is SEND else ""
        if event or held or send or begin:
            rows.append(Row(open_stream, total, issued, late, held, wait, begin, event, send))
            open_stream = NO_STREAM
    if open_stream != NO_STREAM:
        rows.append(Row(open_stream, total, issued, late, False, wait, begin, "", ""))
    return rows, busy
