"""Blocks compiled for the chunk level: kernels that follow each other on a stream become one row.

Nothing can come between the actions of a row: none of them waits for an event but the first, and
none records one but the last.  A row of kernels that take d1, d2, ... and whose host issues take
h1, h2, ... ends d1 + d2 + ... after its start.  Kernel j starts no earlier than the host's clock
before the row + h1 + ... + hj; so the row starts no earlier than that clock + the largest
(h1 + ... + hj) - (d1 + ... + d(j-1)).  The row is as exact as its actions one by one.
"""

from typing import NamedTuple

from rematbench.program.action import STREAM_INDEX, STREAMS, Kind, is_local
from rematbench.program.program import Block
from rematbench.simulate.timing import TIMELESS, Seconds, timings

NO_STREAM = -1
NEVER = float("-inf")
"""The identity of max: a time before every time."""


class Row(NamedTuple):
    """Actions in a row on one stream.  `seconds`: on the stream; `issue`: of the host; `late`: the
    seconds between the host's clock before the row and the earliest start that the host allows (as
    if all waiting for the host came first).  `held`: whether the host waits for the row's end.
    `wait`, `begin` and `event`: the events before the row, of its start and of its end; `shared`:
    whether another block may wait for `event`; `send`: the direction of a message."""

    stream: int
    seconds: float
    issue: float
    late: float
    held: bool
    wait: str
    begin: str
    event: str
    shared: bool
    send: str


class RowBlock(NamedTuple):
    """A compiled block: its rows, the events of messages that it waits for, and the seconds in
    which it keeps each stream busy."""

    rows: tuple[Row, ...]
    receives: tuple[str, ...]
    busy_s: tuple[float, ...]


def rows_of(block: Block, rank: int, seconds: Seconds) -> RowBlock:
    """Compile a block into rows.  The loop is plain because every simulation spends its time
    here."""
    timing = timings(seconds)
    rows: list[Row] = []
    busy = [0.0] * len(STREAMS)
    open_stream, total, issued, late, wait, begin = NO_STREAM, 0.0, 0.0, NEVER, "", ""
    for action in block.actions:
        if action.kind in TIMELESS:
            continue
        taken, issue, held = timing(action, rank)
        stream = STREAM_INDEX[action.stream]
        busy[stream] += taken
        if stream != open_stream or action.wait or action.begin:
            if open_stream != NO_STREAM:
                row = Row(open_stream, total, issued, late, False, wait, begin, "", False, "")
                rows.append(row)
            open_stream, total, issued, late = stream, 0.0, 0.0, NEVER
            wait, begin = action.wait, action.begin
        if issue:
            issued += issue
            late = max(late, issued - total)
        total += taken
        event, send = action.event, action.op if action.kind is Kind.SEND else ""
        if event or held or send or begin:
            shared = bool(event) and not is_local(event)
            rows.append(
                Row(open_stream, total, issued, late, held, wait, begin, event, shared, send)
            )
            open_stream = NO_STREAM
    if open_stream != NO_STREAM:
        rows.append(Row(open_stream, total, issued, late, False, wait, begin, "", False, ""))
    receives = tuple([row.wait for row in rows if row.wait.startswith("recv_")])
    return RowBlock(tuple(rows), receives, tuple(busy))
