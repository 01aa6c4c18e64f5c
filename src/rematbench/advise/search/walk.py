"""Walks a step's passes rank by rank, as lower bounds of its seconds need it.

A long schedule is walked in three parts: up to a point of one period, on to the same point of the
next, and to the end.  Where every clock moves by the same seconds between the two points, all
further periods move them alike (the walk is a (max, +) map), so that they are not walked.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from rematbench.advise.search.events import (
    FETCH,
    NONE,
    PASS,
    Copies,
    Events,
    Turns,
    events,
    shortened,
)

ALIKE = 1e-9
"""Share of a period's seconds by which its clocks may differ."""


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


class Clocks:
    """When each rank's compute, host and copies to the host and back end so far, and by pass: when
    its message is sent; by forward: when its copies to the host (`gone`) and back (`here`) end."""

    def __init__(self, turns: Turns, begun_s: Sequence[float]) -> None:
        self.turns, self.compute = turns, list(begun_s)
        self.host, self.out, self.back = ([0.0] * turns.pp for _ in range(3))
        self.sent = [0.0] * (2 * turns.half)
        self.gone, self.here = list(self.sent), list(self.sent)

    @property
    def ranks(self) -> tuple[list[float], ...]:
        """The clocks of ranks as they are now."""
        return self.compute.copy(), self.host.copy(), self.out.copy(), self.back.copy()

    def leap(self, before: tuple[list[float], ...], period: Events, times: int) -> bool:
        """Move all clocks by `times` further periods, if the last one moved them alike; hosts may
        only have gained on compute, which then does not wait for them.  `before`: the clocks of
        ranks before the last period."""
        moved_s = self.compute[0] - before[0][0]
        slack_s = ALIKE * moved_s

        def alike(now: Sequence[float], earlier: Sequence[float]) -> bool:
            """Whether all of some times moved alike; those of copies that are not made stay 0."""
            pairs = zip(now, earlier, strict=True)
            return all(abs(a - b - moved_s) <= slack_s for a, b in pairs if a)

        ranks = zip(self.ranks, before, strict=True)
        compute, host, out, back = ([*zip(now, was, strict=True)] for now, was in ranks)
        if not all(alike(*zip(*clocks, strict=True)) for clocks in (compute, out, back)):
            return False
        if any(now - was > moved_s + slack_s for now, was in host):
            return False
        issued = [*zip(period.kind, period.own, strict=True)]
        passes, fetched = ([own for kind, own in issued if kind == of] for of in (PASS, FETCH))
        for ends, owns in ((self.sent, passes), (self.gone, passes), (self.here, fetched)):
            if not alike([ends[own] for own in owns], [ends[own - self.turns.pp] for own in owns]):
                return False
        more_s = times * moved_s
        self.host = [now + times * (now - was) for now, was in host]
        self.compute, self.out, self.back, self.sent, self.gone, self.here = (
            [at + more_s if at else at for at in clocks]
            for clocks in (self.compute, self.out, self.back, self.sent, self.gone, self.here)
        )
        return True


Walk = Callable[[Events, Clocks], None]


def _walked(
    turns: Turns, copies: Copies | None, begun_s: Sequence[float], walk: Walk
) -> list[float]:
    short, left_out = shortened(turns)
    if left_out:
        first, period, rest = events(short, copies, cut=True)
        clocks = Clocks(short, begun_s)
        walk(first, clocks)
        before = clocks.ranks
        walk(period, clocks)
        if clocks.leap(before, period, left_out):
            walk(rest, clocks)
            return clocks.compute
    clocks = Clocks(turns, begun_s)
    (found,) = events(turns, copies)
    walk(found, clocks)
    return clocks.compute


ByPiece = list[tuple[float, float, float, float]]
"""The seconds of `Pieces` by piece."""


def walked(turns: Turns, pieces: Pieces, rules: Rules, begun_s: Sequence[float]) -> list[float]:
    """Seconds when each rank's compute ends, after passes that begin at `begun_s`."""
    seconds = list(zip(*pieces, strict=True))
    return _walked(turns, None, begun_s, partial(_walk, seconds, rules))


def _walk(seconds: ByPiece, rules: Rules, found: Events, clocks: Clocks) -> None:
    compute, host, sent = clocks.compute, clocks.host, clocks.sent
    waits, held = rules
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
    seconds = list(zip(*pieces, strict=True))
    return _walked(turns, copies, begun_s, partial(_walk_beside, seconds, beside, rules))


def _walk_beside(
    seconds: ByPiece, beside: Beside, rules: Rules, found: Events, clocks: Clocks
) -> None:
    compute, host, out, back = clocks.compute, clocks.host, clocks.out, clocks.back
    sent, gone, here, half = clocks.sent, clocks.gone, clocks.here, clocks.turns.half
    out_s, back_s, landed_s, holds = beside
    waits, held = rules
    for kind, rank, piece, warming, own, source in zip(*found, strict=True):
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
