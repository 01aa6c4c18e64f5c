"""Walks through the passes of a step and the copies during them, in the order of the schedule.

The order of events follows from the schedule alone.  It is computed once, as arrays with an entry
per event, and walked for every plan with the plan's seconds.

A long schedule is walked in three parts: up to a point of one period, on to the same point of the
next period, and to the end.  If every clock advances by the same seconds between the two points,
all further periods advance the clocks equally (the walk is a (max, +) map), so they are skipped."""

from array import array
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematbench.engine.lowering.schedule import passes
from rematbench.plan import Schedule

NONE = -1


PASS, FETCH, FREE = range(3)
"""The kinds of events: a pass; the start of the copies back for a later backward; compute waits
until the copies of a forward have ended and their device memory is free."""


class Turns(NamedTuple):
    """The settings that decide the order of passes."""

    schedule: Schedule
    pp: int
    vpp: int
    micro_batches: int

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    @property
    def half(self) -> int:
        """The number of backwards.  Passes are numbered by stage and then by micro-batch, first all
        backwards and then all forwards."""
        return self.stages * self.micro_batches


GROUPS = 5
"""The groups of pp micro-batches that a shortened schedule keeps: the warm-up with the first group,
two whole periods to compare, and the end."""
CUTS = (2, 3)
"""The numbers of periods (of a group's backwards) after which a shortened schedule is cut."""


def shortened(turns: Turns) -> tuple[Turns, int]:
    """The schedule without some periods of its steady state, and the number of periods left out.
    In a period every rank runs the passes of pp micro-batches."""
    left_out = turns.micro_batches // turns.pp - GROUPS
    whole = turns.vpp == 1 or turns.micro_batches % turns.pp == 0
    if turns.schedule == "gpipe" or turns.pp == 1 or left_out < 1 or not whole:
        return turns, 0
    return turns._replace(micro_batches=turns.micro_batches - left_out * turns.pp), left_out


class Copies(NamedTuple):
    """The settings that decide the events of copies during other passes: whether `whole` chunks are
    copied, and after how many passes their device memory is free (`Transfers.release_lag`)."""

    whole: bool
    release_lag: int


class Events(NamedTuple):
    """Columns of all events of all ranks; each event comes after the events that it waits for.
    `piece`: for a pass, twice its stage, plus one for a forward; for another event, the stage.
    `warming`: whether the pass belongs to its rank's warm-up.  `pass_id`: the number of the pass
    (`Turns.half`); for copies, the number of their forward.  `source`: the number of the pass whose
    message a pass waits for, or NONE."""

    kind: Sequence[int]
    rank: Sequence[int]
    piece: Sequence[int]
    warming: Sequence[int]
    pass_id: Sequence[int]
    source: Sequence[int]


@lru_cache(maxsize=128)
def events(turns: Turns, copies: Copies | None, *, cut: bool = False) -> tuple[Events, ...]:
    """The events of a schedule; without `copies`, only passes. With `cut` there are three parts:
    each rank's events up to a point of one period, those up to the same point of the next period,
    and the rest."""
    passed = _passes(turns, cut)
    count = len(passed.pass_id)
    piece = 2 * (passed.pass_id // turns.micro_batches % turns.stages) + (
        passed.pass_id >= turns.half
    )
    warming = passed.position < np.array([_warm(turns, r) for r in range(turns.pp)])[passed.rank]
    columns = [0 * passed.pass_id, passed.rank, piece, warming, passed.pass_id, passed.source]
    keys = [3 * np.arange(count) + 1]
    if copies:
        at = np.empty((turns.pp, count // turns.pp), dtype=int)
        at[passed.rank, passed.position] = np.arange(count)
        for rank in range(turns.pp):
            for kind, due in _copies(turns, copies, rank).items():
                where, pass_id = np.array(due).T
                keys.append(3 * at[rank, where] + (0 if kind == FETCH else 2))
                stage = pass_id // turns.micro_batches % turns.stages
                more = (kind, rank, stage, 0, pass_id, NONE)
                columns = [
                    np.append(a, np.broadcast_to(b, pass_id.shape))
                    for a, b in zip(columns, more, strict=True)
                ]
    key = np.concatenate(keys)
    order = np.argsort(key, kind="stable")
    ends = np.searchsorted(key[order], [3 * end for end in passed.cuts])
    parts = zip(*(np.split(column[order], ends) for column in columns), strict=True)
    return tuple(
        Events(*(array("i", column.astype(np.int32).tobytes()) for column in part))
        for part in parts
    )


class _Passes(NamedTuple):
    """All passes, each after the passes that it waits for: rank, position in the rank's order,
    number, and the number of the pass whose message it waits for.  `cuts`: how many passes come
    before each cut."""

    rank: NDArray[np.int64]
    position: NDArray[np.int64]
    pass_id: NDArray[np.int64]
    source: NDArray[np.int64]
    cuts: tuple[int, ...]


@lru_cache(maxsize=32)
def _passes(turns: Turns, cut: bool) -> _Passes:
    columns = [_of_rank(turns, rank) for rank in range(turns.pp)]
    queues = [(pass_id.tolist(), source.tolist()) for pass_id, source in columns]
    at = [0] * turns.pp
    done = bytearray(2 * turns.half + 1)
    done[NONE] = True
    found: list[tuple[int, int, int]] = []
    cuts: list[int] = []
    for ends in [*_cuts(turns, cut), [len(ids) for ids, _ in queues]]:
        while at != ends:
            before = at.copy()
            for rank, (ids, sources) in enumerate(queues):
                begun = here = at[rank]
                while here < ends[rank] and done[sources[here]]:
                    done[ids[here]] = True
                    here += 1
                if here > begun:
                    found.append((rank, begun, here))
                    at[rank] = here
            assert at != before, f"a pass before a cut of {turns} waits for one after it"
        cuts.append(sum(ends))
    ranks, begins, ends = np.array(found).T
    return _Passes(
        np.repeat(ranks, ends - begins),
        np.concatenate([np.arange(begun, end) for _, begun, end in found]),
        np.concatenate([columns[rank][0][begun:end] for rank, begun, end in found]),
        np.concatenate([columns[rank][1][begun:end] for rank, begun, end in found]),
        tuple(cuts[:-1]),
    )


def _cuts(turns: Turns, cut: bool) -> list[list[int]]:
    """The number of passes of each rank before each cut.  A rank has finished one more backward
    than the rank before it, so that no pass before a cut waits for one after it."""
    backwards = [periods * turns.pp * turns.vpp for periods in CUTS] if cut else []
    ranks = range(turns.pp)
    return [[_warm(turns, rank) + 2 * (count + rank) for rank in ranks] for count in backwards]


def _of_rank(turns: Turns, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers of a rank's passes in order, and the numbers of the passes whose messages they
    wait for."""
    order = passes(turns.schedule, rank, turns.pp, turns.vpp, turns.micro_batches)
    numbers = np.fromiter(chain.from_iterable(order), np.int64, 3 * len(order))
    forward, micro_batch, chunk = numbers.reshape(-1, 3).T
    stage = chunk * turns.pp + rank
    pass_id = turns.half * forward + stage * turns.micro_batches + micro_batch
    first = np.where(forward, stage == 0, stage == turns.stages - 1)
    source = pass_id + np.where(forward, -turns.micro_batches, turns.micro_batches)
    return pass_id, np.where(first, NONE, source)


def _warm(turns: Turns, rank: int) -> int:
    order = passes(turns.schedule, rank, turns.pp, turns.vpp, turns.micro_batches)
    return max(0, next(index for index, item in enumerate(order) if not item.forward) - 1)


def _copies(turns: Turns, copies: Copies, rank: int) -> dict[int, list[tuple[int, int]]]:
    """By kind of event, the positions in a rank's order at which copies back begin or compute waits
    for copies to the host, each with the number of the forward, as in
    engine/lowering/rank_steps.py.  Copies back of a whole chunk begin with the rank's previous
    backward, those of a chunk's last layer with its previous pass, but never before the chunk's
    forward has ended."""
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


ALIKE = 1e-9
"""The share of a period's seconds by which clocks may differ and still count as equal."""


class Pieces(NamedTuple):
    """Seconds of each stage's backward and forward, in this order (`Events.piece`): of compute once
    it is free; from the host's start until compute ends; of the host; and of the message sent
    afterwards (0: none)."""

    compute_s: Sequence[float]
    issued_s: Sequence[float]
    host_s: Sequence[float]
    message_s: Sequence[float]


class CopyTimes(NamedTuple):
    """By stage, the seconds of the copies that run during other passes: to the host (`out_s`) and
    back (`back_s`); `landed_s`: from their arrival to the end of the backward. `held`: whether
    messages of the warm-up wait for the copies before them."""

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
    """The clocks of a walk, in seconds. By rank: when compute, the host, and the copies to the host
    and back end so far. By pass: when its message is sent. By forward: when its copies to the host
    (`gone`) and back (`here`) end."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.compute = turns, [0.0] * turns.pp
        self.host, self.out, self.back = ([0.0] * turns.pp for _ in range(3))
        self.sent = [0.0] * (2 * turns.half)
        self.gone, self.here = list(self.sent), list(self.sent)

    @property
    def ranks(self) -> tuple[list[float], ...]:
        """A copy of all ranks' clocks as they stand now: compute, host, copies out and back."""
        return self.compute.copy(), self.host.copy(), self.out.copy(), self.back.copy()

    def leap(self, before: tuple[list[float], ...], period: Events, times: int) -> bool:
        """Advance all clocks by `times` further periods, if the last period advanced them equally.
        Hosts may have advanced less: compute then does not wait for them.  `before`: the ranks'
        clocks before the last period."""
        moved_s = self.compute[0] - before[0][0]
        slack_s = ALIKE * moved_s

        def alike(now: Sequence[float], earlier: Sequence[float]) -> bool:
            """Whether all times moved by `moved_s`; times of copies that do not occur stay 0."""
            pairs = zip(now, earlier, strict=True)
            return all(abs(a - b - moved_s) <= slack_s for a, b in pairs if a)

        ranks = zip(self.ranks, before, strict=True)
        compute, host, out, back = ([*zip(now, was, strict=True)] for now, was in ranks)
        if not all(alike(*zip(*clocks, strict=True)) for clocks in (compute, out, back)):
            return False
        if any(now - was > moved_s + slack_s for now, was in host):
            return False
        issued = [*zip(period.kind, period.pass_id, strict=True)]
        passes, fetched = (
            [pass_id for kind, pass_id in issued if kind == of] for of in (PASS, FETCH)
        )
        for ends, ids in ((self.sent, passes), (self.gone, passes), (self.here, fetched)):
            if not alike(
                [ends[pass_id] for pass_id in ids],
                [ends[pass_id - self.turns.pp] for pass_id in ids],
            ):
                return False
        more_s = times * moved_s
        self.host = [now + times * (now - was) for now, was in host]
        self.compute, self.out, self.back, self.sent, self.gone, self.here = (
            [at + more_s if at else at for at in clocks]
            for clocks in (self.compute, self.out, self.back, self.sent, self.gone, self.here)
        )
        return True


ByPiece = list[tuple[float, float, float, float]]
"""The numbers of `Pieces`, one tuple per piece."""


def walk(
    turns: Turns,
    pieces: Pieces,
    rules: Rules,
    copies: Copies | None = None,
    copy_times: CopyTimes | None = None,
) -> list[float]:
    """The seconds at which each rank's compute ends.  Copies during other passes have separate
    clocks on each rank: a copy to the host begins when its forward ends, a copy back at its entry
    in `events`, and compute waits for both."""
    none = [0.0] * turns.stages
    copy_times = copy_times or CopyTimes(none, none, none, held=False)
    step = partial(_walk, list(zip(*pieces, strict=True)), copy_times, rules)
    short, left_out = shortened(turns)
    if left_out:
        first, period, rest = events(short, copies, cut=True)
        clocks = Clocks(short)
        step(first, clocks)
        before = clocks.ranks
        step(period, clocks)
        if clocks.leap(before, period, left_out):
            step(rest, clocks)
            return clocks.compute
    clocks = Clocks(turns)
    (order,) = events(turns, copies)
    step(order, clocks)
    return clocks.compute


def _walk(
    seconds: ByPiece, copy_times: CopyTimes, rules: Rules, order: Events, clocks: Clocks
) -> None:
    compute, host, out, back = clocks.compute, clocks.host, clocks.out, clocks.back
    sent, gone, here, half = clocks.sent, clocks.gone, clocks.here, clocks.turns.half
    out_s, back_s, landed_s, holds = copy_times
    waits, held = rules
    for kind, rank, piece, warming, pass_id, source in zip(*order, strict=True):
        at = compute[rank]
        if kind:  # compute waits for copies to the host, and copies back begin
            compute[rank] = at = max(at, gone[pass_id])
            if kind == FETCH and (taken := back_s[piece]):
                begun = back[rank]
                here[pass_id] = back[rank] = (begun if begun > at else at) + taken
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
        if pass_id < half:  # the pass is a backward
            landed = here[pass_id + half]
            at = max(at, landed + landed_s[piece >> 1]) if landed else at
            sent[pass_id] = at + message_s
            compute[rank] = sent[pass_id] if waits else at
            continue
        begun = out[rank]
        sent[pass_id] = (begun if holds and warming and begun > at else at) + message_s
        compute[rank] = sent[pass_id] if waits and message_s else at
        if taken := out_s[piece >> 1]:
            out[rank] = gone[pass_id] = (begun if begun > at else at) + taken
