"""Walks a step's passes rank by rank, as lower bounds of its seconds need it.

The order of passes, messages and copies follows from the schedule alone.  It is written down once,
as arrays with an entry per event, and walked again for every plan with that plan's seconds.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


@lru_cache(maxsize=128)
def events(turns: Turns, copies: Copies | None) -> Events:
    """The events of a schedule; without copies, of passes only."""
    passed = _passes(turns)
    count = len(passed.own)
    piece = 2 * (passed.own // turns.micro_batches % turns.stages) + (passed.own >= turns.half)
    warming = passed.position < np.array([_warm(turns, r) for r in range(turns.pp)])[passed.rank]
    columns = [0 * passed.own, passed.rank, piece, warming, passed.own, passed.source]
    if copies:
        at = np.empty((turns.pp, count // turns.pp), dtype=int)
        at[passed.rank, passed.position] = np.arange(count)
        keys = [3 * np.arange(count) + 1]
        for rank in range(turns.pp):
            for kind, due in _copies(turns, copies, rank).items():
                where, own = np.array(due).T
                keys.append(3 * at[rank, where] + (0 if kind == FETCH else 2))
                stage = own // turns.micro_batches % turns.stages
                more = (kind, rank, stage, 0, own, NONE)
                columns = [
                    np.append(a, np.broadcast_to(b, own.shape))
                    for a, b in zip(columns, more, strict=True)
                ]
        order = np.argsort(np.concatenate(keys), kind="stable")
        columns = [column[order] for column in columns]
    return Events(*(array("i", column.astype(np.int32).tobytes()) for column in columns))


class _Passes(NamedTuple):
    """All passes, each after the passes that it waits for: rank, position in the rank's order,
    number, and the number of the pass whose message it waits for."""

    rank: NDArray[np.int64]
    position: NDArray[np.int64]
    own: NDArray[np.int64]
    source: NDArray[np.int64]


@lru_cache(maxsize=32)
def _passes(turns: Turns) -> _Passes:
    queues = [_of_rank(turns, rank) for rank in range(turns.pp)]
    at, left = [0] * turns.pp, 2 * turns.half
    done = bytearray(left + 1)
    done[NONE] = True
    found: list[tuple[int, int, int]] = []
    while left:
        for rank, (owns, sources) in enumerate(queues):
            begun = here = at[rank]
            while here < len(owns) and done[sources[here]]:
                done[owns[here]] = True
                here += 1
            if here > begun:
                found.append((rank, begun, here))
                at[rank] = here
                left -= here - begun
    parts = [
        ([rank] * (end - begun), range(begun, end), owns[begun:end], sources[begun:end])
        for rank, begun, end in found
        for owns, sources in [queues[rank]]
    ]
    return _Passes(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _of_rank(turns: Turns, rank: int) -> tuple[list[int], list[int]]:
    """The passes of a rank in their order: their numbers, and the numbers of the passes whose
    messages they wait for."""
    order = passes(turns.schedule, rank, turns.pp, turns.vpp, turns.micro_batches)
    forward, micro_batch, chunk = np.array(order).T
    stage = chunk * turns.pp + rank
    own = turns.half * forward + stage * turns.micro_batches + micro_batch
    first = np.where(forward, stage == 0, stage == turns.stages - 1)
    source = own + np.where(forward, -turns.micro_batches, turns.micro_batches)
    return own.tolist(), np.where(first, NONE, source).tolist()


def _warm(turns: Turns, rank: int) -> int:
    """The number of passes of a rank's warm-up."""
    order = passes(turns.schedule, rank, turns.pp, turns.vpp, turns.micro_batches)
    return max(0, next(index for index, item in enumerate(order) if not item.forward) - 1)


def _copies(turns: Turns, copies: Copies, rank: int) -> dict[int, list[tuple[int, int]]]:
    """By kind of event: the positions in a rank's order where copies back begin, and where compute
    waits for copies to the host, with the numbers of their forwards, as in
    lowering/rank_steps.py.  Copies back of a whole chunk begin with the backward before the
    chunk's own, those of a chunk's last layer with the pass before, but both after the chunk's
    forward."""
    found: dict[int, list[tuple[int, int]]] = {FETCH: [], FREE: []}
    forward_at: dict[int, int] = {}
    half, stride, previous = turns.half, turns.micro_batches, -1
    order = passes(turns.schedule, rank, turns.pp, turns.vpp, turns.micro_batches)
    for index, (forward, micro_batch, chunk) in enumerate(order):
        number = half + (chunk * turns.pp + rank) * stride + micro_batch
        if forward:
            forward_at[number] = index
            if index + copies.release_lag < len(order):
                found[FREE].append((index + copies.release_lag, number))
            continue
        beside = previous if copies.whole and previous >= 0 else index - 1
        found[FETCH].append((max(beside, forward_at[number] + 1), number))
        previous = index
    return {kind: due for kind, due in found.items() if due}


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
    waits, held = rules
    found = events(turns, None)
    for rank, piece, own, source in zip(
        found.rank, found.piece, found.own, found.source, strict=True
    ):
        at, issued = compute[rank], host[rank]
        if source != NONE:
            if (came := sent[source]) > at:
                at = came
            if held and at > issued:
                issued = at
        taken, from_host, of_host, message_s = seconds[piece]
        host[rank] = issued + of_host
        at += taken
        if (later := issued + from_host) > at:
            at = later
        sent[own] = message = at + message_s
        compute[rank] = message if waits else at
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
    out_s, back_s, landed_s, holds = beside
    waits, held = rules
    for kind, rank, piece, warming, own, source in zip(*events(turns, copies), strict=True):
        at = compute[rank]
        if kind:  # compute waits for copies to the host, and copies back begin
            compute[rank] = at = max(at, gone[own])
            if kind == FETCH and (taken := back_s[piece]):
                begun = back[rank]
                here[own] = back[rank] = (begun if begun > at else at) + taken
            continue
        issued = host[rank]
        if source != NONE:
            if (came := sent[source]) > at:
                at = came
            if held and at > issued:
                issued = at
        taken, from_host, of_host, message_s = seconds[piece]
        host[rank] = issued + of_host
        at += taken
        if (later := issued + from_host) > at:
            at = later
        if own < half:  # a backward
            landed = here[own + half]
            at = max(at, landed + landed_s[piece >> 1]) if landed else at
            sent[own] = at + message_s
            compute[rank] = sent[own] if waits else at
            continue
        begun = out[rank]
        sent[own] = (begun if holds and warming and begun > at else at) + message_s
        compute[rank] = sent[own] if waits and message_s else at
        if taken := out_s[piece >> 1]:
            out[rank] = gone[own] = (begun if begun > at else at) + taken
    return compute
