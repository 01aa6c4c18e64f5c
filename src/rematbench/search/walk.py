"""Walks a step's passes rank by rank, as lower bounds of its seconds need it.

The order of passes, messages and copies follows from the schedule alone.  It is written down once,
as arrays with an entry per event, and walked again for every plan with that plan's seconds.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rematbench.lowering.schedule import ScheduleName, passes

Node = tuple[int, bool, int, int]
"""(rank, forward, micro-batch, chunk)."""

NONE = -1

PASS, FETCH, FREE = range(3)
"""Events: a pass; the copies of a later backward begin; compute waits for the copies of a forward,
whose device memory must be free by now."""


class Turns(NamedTuple):
    """What decides the order of passes."""

    schedule: ScheduleName
    pp: int
    vpp: int
    micro_batches: int

    @property
    def stages(self) -> int:
        """The number of virtual stages."""
        return self.pp * self.vpp

    @property
    def half(self) -> int:
        """The number of backwards.  Passes are numbered by stage and then by micro-batch, first all
        backwards and then all forwards."""
        return self.stages * self.micro_batches


class Copies(NamedTuple):
    """What decides the events of copies beside other passes: whether they are of whole chunks, and
    after how many passes their device memory is free (`Transfers.release_lag`)."""

    whole: bool
    release_lag: int


class Events(NamedTuple):
    """All events of all ranks, each after the events that it waits for, as columns.  `piece`: twice
    the stage of a pass, plus one for a forward; of another event the stage.  `warming`: whether the
    pass is of its rank's warm-up.  `own`: the number of the pass (`Turns.half`), of copies that
    of their forward; `source`: the number of the pass whose message a pass waits for, NONE for no
    message."""

    kind: Sequence[int]
    rank: Sequence[int]
    piece: Sequence[int]
    warming: Sequence[int]
    own: Sequence[int]
    source: Sequence[int]


def in_order(turns: Turns) -> list[Node]:
    """All passes of all ranks, each after the passes that it waits for."""
    found = events(turns, None)
    return [
        (rank, bool(piece % 2), own % turns.micro_batches, piece // 2 // turns.pp)
        for rank, piece, own in zip(found.rank, found.piece, found.own, strict=True)
    ]


Event = tuple[int, int, int, bool, int, int]
"""An entry of Events."""


class Turn(NamedTuple):
    """A pass of a rank: its number, the number of the pass whose message it waits for, and its
    events: copies back that begin before it, the pass, and waits for copies after it."""

    own: int
    source: int
    events: tuple[Event, ...]


@lru_cache(maxsize=64)
def events(turns: Turns, copies: Copies | None) -> Events:
    """The events of a schedule; without copies, of passes only."""
    queues = [_of_rank(turns, copies, rank) for rank in range(turns.pp)]
    at, left = [0] * turns.pp, 2 * turns.half
    done = bytearray(left + 1)
    done[NONE] = True
    found: list[Event] = []
    while left:
        for rank, queue in enumerate(queues):
            here = at[rank]
            while here < len(queue) and done[queue[here].source]:
                done[queue[here].own] = True
                found += queue[here].events
                here += 1
            left -= here - at[rank]
            at[rank] = here
    return Events(*(array("l", column) for column in zip(*found, strict=True)))


def _of_rank(turns: Turns, copies: Copies | None, rank: int) -> list[Turn]:
    """The passes of a rank in their order."""
    order = passes(turns.schedule, rank, turns.pp, turns.vpp, turns.micro_batches)
    warm = max(0, next(index for index, item in enumerate(order) if not item.forward) - 1)
    fetched, freed = _copies(turns, copies, rank) if copies else ({}, {})
    found = []
    half, stride, pp, last = turns.half, turns.micro_batches, turns.pp, turns.stages - 1
    for index, (forward, micro_batch, chunk) in enumerate(order):
        stage = chunk * pp + rank
        own = half * forward + stage * stride + micro_batch
        source = own - stride if forward else own + stride
        source = source if stage != (0 if forward else last) else NONE
        event = (PASS, rank, 2 * stage + forward, index < warm, own, source)
        begun, ended = fetched.get(index, ()), freed.get(index, ())
        if begun or ended:
            before = [(FETCH, rank, at // stride % (last + 1), False, at, NONE) for at in begun]
            after = [(FREE, rank, at // stride % (last + 1), False, at, NONE) for at in ended]
            found.append(Turn(own, source, (*before, event, *after)))
        else:
            found.append(Turn(own, source, (event,)))
    return found


Due = dict[int, list[int]]
"""Position in a rank's order -> numbers of forwards."""


def _copies(turns: Turns, copies: Copies, rank: int) -> tuple[Due, Due]:
    """Where a rank's copies back begin, and where compute waits for its copies to the host, as in
    lowering/rank_steps.py.  Copies back of a whole chunk begin with the backward before the chunk's
    own, those of a chunk's last layer with the pass before, but both after the chunk's forward."""
    fetched: Due = {}
    freed: Due = {}
    forward_at: dict[int, int] = {}
    half, stride, previous = turns.half, turns.micro_batches, -1
    order = passes(turns.schedule, rank, turns.pp, turns.vpp, turns.micro_batches)
    for index, (forward, micro_batch, chunk) in enumerate(order):
        number = half + (chunk * turns.pp + rank) * stride + micro_batch
        if forward:
            forward_at[number] = index
            freed.setdefault(index + copies.release_lag, []).append(number)
            continue
        beside = previous if copies.whole and previous >= 0 else index - 1
        fetched.setdefault(max(beside, forward_at[number] + 1), []).append(number)
        previous = index
    return fetched, freed


class Pieces(NamedTuple):
    """Seconds of each stage's backward and forward, in this order (`Events.piece`): compute from
    when it is free; until compute ends from the host's start; the host; and the message that is
    sent after, 0 for none."""

    compute_s: Sequence[float]
    issued_s: Sequence[float]
    host_s: Sequence[float]
    message_s: Sequence[float]


class Beside(NamedTuple):
    """Seconds by stage of copies beside other passes, to the host (`out_s`) and back (`back_s`),
    and from their arrival to the end of the backward (`landed_s`).  `held`: whether messages of the
    warm-up wait for the copies before."""

    out_s: Sequence[float]
    back_s: Sequence[float]
    landed_s: Sequence[float]
    held: bool


class Rules(NamedTuple):
    """Whether compute waits for its own sends, and whether the host is held until messages
    arrive."""

    waits: bool
    held: bool


def walked(turns: Turns, pieces: Pieces, rules: Rules, begun_s: Sequence[float]) -> list[float]:
    """Seconds when each rank's compute ends, after passes that begin at `begun_s`."""
    compute, host = list(begun_s), [0.0] * turns.pp
    sent = [0.0] * (2 * turns.half)
    seconds = list(zip(*pieces, strict=True))
    found = events(turns, None)
    for rank, piece, own, source in zip(
        found.rank, found.piece, found.own, found.source, strict=True
    ):
        at, issued = compute[rank], host[rank]
        if source != NONE:
            at = max(at, sent[source])
            if rules.held and at > issued:
                issued = at
        taken, from_host, of_host, message_s = seconds[piece]
        host[rank] = issued + of_host
        at = max(at + taken, issued + from_host)
        sent[own] = at + message_s
        compute[rank] = sent[own] if rules.waits else at
    return compute


def walked_beside(
    turns: Turns,
    copies: Copies,
    pieces: Pieces,
    beside: Beside,
    rules: Rules,
    begun_s: Sequence[float],
) -> list[float]:
    """As `walked`, with copies beside passes.  Copies have their own clocks on each rank: a copy to
    the host begins when its forward has ended, a copy back where `events` says, and compute waits
    for both."""
    compute, host = list(begun_s), [0.0] * turns.pp
    out, back, half = [0.0] * turns.pp, [0.0] * turns.pp, turns.half
    sent = [0.0] * (2 * half)
    gone, here = list(sent), list(sent)  # by forward: when its copies to the host, and back, end
    seconds = list(zip(*pieces, strict=True))
    for kind, rank, piece, warming, own, source in zip(*events(turns, copies), strict=True):
        at = compute[rank]
        if kind == FREE:
            compute[rank] = max(at, gone[own])
            continue
        if kind == FETCH:
            if taken := beside.back_s[piece]:
                compute[rank] = at = max(at, gone[own])
                here[own] = back[rank] = max(back[rank], at) + taken
            continue
        issued = host[rank]
        if source != NONE:
            at = max(at, sent[source])
            if rules.held and at > issued:
                issued = at
        taken, from_host, of_host, message_s = seconds[piece]
        host[rank] = issued + of_host
        at = max(at + taken, issued + from_host)
        stage, forward = divmod(piece, 2)
        if not forward and here[own + half]:
            at = max(at, here[own + half] + beside.landed_s[stage])
        last = max(at, out[rank]) if forward and warming and beside.held else at
        sent[own] = last + message_s
        compute[rank] = sent[own] if rules.waits and message_s else at
        if forward and (taken := beside.out_s[stage]):
            out[rank] = gone[own] = max(out[rank], at) + taken
    return compute
