"""A block as a macro, exact in (max, +) algebra.

Inside a block every end time is a maximum of (input time + constant). The inputs are the times at
which the streams and the host are free at entry, and the times of outside events for which the
block waits. So a block is a small (max, +) matrix, computed once. For the algebra, see Baccelli,
Cohen, Olsder, Quadrat 1992, Synchronization and Linearity.
"""

from collections.abc import Container, Sequence, Set
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rematbench.engine.program.action import STREAM_INDEX, STREAMS
from rematbench.engine.program.storage import Event
from rematbench.engine.simulate.block_rows import NEVER, Row, RowBlock, RowPart
from rematbench.engine.simulate.op_level import HOST

Affine = dict[int, float]
"""A maximum of (input + constant): the constant by input index. Inputs are the streams, the host,
then events from outside the block."""

COMPUTE = STREAM_INDEX["compute"]

AffineTerms = tuple[tuple[int, float], ...]


class Terms(NamedTuple):
    """The time at which a stream or the host (index `target`) is free, as terms of a maximum."""

    target: int
    terms: AffineTerms


# Why: docs/decisions/engine.md, Is a macro a duration with fixed offsets?
class Macro(NamedTuple):
    """A block as a (max, +) map: the ends of streams, the times of events and messages (by
    direction), the outside events for which it waits, and the messages among them."""

    streams: tuple[Terms, ...]
    events: tuple[tuple[Event, AffineTerms], ...]
    sends: tuple[tuple[str, AffineTerms], ...]
    waits: tuple[Event, ...]
    receives: tuple[Event, ...]


Matrix: TypeAlias = NDArray[np.float64]
Shifted = tuple[Affine, float]
"""A maximum of terms, and seconds to add to each; successive kernels change only the seconds."""


def _join(a: Shifted, b: Shifted) -> Shifted:
    """The later of two times; the object `a` itself if `b` is never later."""
    (terms, shift), (others, other) = a, b
    if terms is others:
        return a if shift >= other else b
    merged = None
    for key, value in others.items():
        at = value + other - shift
        if at > terms.get(key, NEVER):
            merged = merged or dict(terms)
            merged[key] = at
    return a if merged is None else (merged, shift)


def _latest(row: Matrix, times: Sequence[Shifted | None]) -> Shifted | None:
    """The maximum of (time + constant) over a row of a matrix; None if no time is known."""
    found = None
    for at in np.flatnonzero(row > NEVER).tolist():
        if (time := times[at]) is not None:
            end = (time[0], time[1] + float(row[at]))
            found = end if found is None else _join(found, end)
    return found


def power(ends: Sequence[Shifted], times: int) -> Matrix:
    """Return the (max, +) power of the square matrix with the rows `ends`; `times` >= 1."""
    base: Matrix = np.full((len(ends), len(ends)), NEVER)
    for row, (terms, shift) in zip(base, ends, strict=True):
        for at, constant in terms.items():
            row[at] = constant + shift
    found: Matrix | None = None
    while True:
        if times % 2:
            found = base if found is None else _product(found, base)
        times //= 2
        if not times:
            assert found is not None
            return found
        base = _product(base, base)


def _product(a: Matrix, b: Matrix) -> Matrix:
    product: Matrix = (a[:, :, None] + b).max(axis=1)
    return product


def _frozen(value: Shifted) -> AffineTerms:
    terms, shift = value
    return tuple([(key, at + shift) for key, at in terms.items()])


class _Run:
    """A symbolic run of blocks, with the times at which streams and the host are free and at which
    events happen. `inputs`: the streams and outside events whose times at entry matter (None:
    all)."""

    def __init__(self, inputs: Container[int | Event] | None = None) -> None:
        self.inputs = inputs
        self.free = [self._input(index, index) for index in range(HOST + 1)]
        self.touched: set[int] = set()
        self.externals: dict[Event, int] = {}
        self.events: dict[Event, Shifted] = {}
        self.sends: list[tuple[str, Shifted]] = []

    def run(self, parts: Sequence[RowPart], seen: dict[Event, Shifted], later: Set[Event]) -> None:
        """Issue and run parts in order. `seen`: the times of events so far; the events of the parts
        are added. `later`: the events for which other parts or blocks wait."""
        for part in parts:
            if part.times > 1:
                self._again(part, seen, later)
            else:
                seen |= part.renamed(seen)
                self._once(part, seen, later)

    def _once(self, part: RowPart, seen: dict[Event, Shifted], later: Set[Event]) -> None:
        self._rows(part.rows, seen)
        self.run(part.inside, seen, later)

    def _rows(self, rows: tuple[Row, ...], seen: dict[Event, Shifted]) -> None:
        """Issue and run rows.  The loop is plain because every simulation spends its time here."""
        free = self.free
        for stream, seconds, issue, late, held, wait, begin, event, send in rows:
            end = free[stream]
            if issue:
                end = self._issued(end, issue, late)
            if wait:
                end = _join(end, self._awaited(wait, seen))
            if begin:
                seen[begin] = end
            if seconds:
                end = (end[0], end[1] + seconds)
            if end is not free[stream]:
                free[stream] = end
                self.touched.add(stream)
            if event:
                seen[event] = end
            if send:
                self.sends.append((send, end))
            if held:
                self._held(end)

    def _again(self, part: RowPart, seen: dict[Event, Shifted], later: Set[Event]) -> None:
        """Issue and run a part `times` times. One turn is a (max, +) matrix, which maps the times
        of streams, the host and events before the turn to those after it. All turns are a power of
        that matrix."""
        turn = _Run()
        named = sorted(later, key=str)
        turn.externals = {event: HOST + 1 + at for at, event in enumerate(named)}
        state: dict[Event, Shifted]
        state = {event: ({at: 0.0}, 0.0) for event, at in turn.externals.items()}
        state |= part.renamed(state)
        turn._once(part, state, later)
        assert not turn.sends
        events = [*turn.externals]  # This includes events for which only the turn's rows wait.
        matrix = power([*turn.free, *(state[event] for event in events)], part.times)
        before = [*self.free, *(seen.get(event) for event in events)]
        after = [_latest(row, before) for row in matrix]
        for stream in turn.touched:
            end = after[stream]
            assert end is not None  # The time at entry is one of the terms.
            self.free[stream] = end
        self.touched |= turn.touched
        seen |= {event: end for event, end in zip(events, after[HOST + 1 :], strict=True) if end}

    def _issued(self, start: Shifted, issue: float, late: float) -> Shifted:
        terms, shift = self.free[HOST]
        self.free[HOST] = (terms, shift + issue)
        self.touched.add(HOST)
        return _join(start, (terms, shift + late))

    def _held(self, end: Shifted) -> None:
        self.free[HOST] = _join(self.free[HOST], end)
        self.touched.add(HOST)

    def _awaited(self, event: Event, seen: dict[Event, Shifted]) -> Shifted:
        """The time of an event; a new external input if no earlier row recorded the event."""
        if event not in seen:
            self.externals[event] = HOST + 1 + len(self.externals)
            seen[event] = self._input(event, self.externals[event])
        return seen[event]

    def _input(self, source: int | Event, index: int) -> Shifted:
        return ({index: 0.0} if self.inputs is None or source in self.inputs else {}, 0.0)


def macro_of(*blocks: RowBlock, inputs: Container[int | Event] | None = None) -> Macro:
    """Return the macro of blocks that are issued in sequence. Local events are known only inside
    their block. `inputs`: the streams and outside events whose times at entry matter (None:
    all)."""
    run = _Run(inputs)
    seen: dict[Event, Shifted] = {}
    for block in blocks:
        seen = {event: value for event, value in seen.items() if not event.is_local}
        later = {*block.shared, *(old for part in block.parts for old in part.old_events())}
        run.run(block.parts, seen, later)
        run.events |= {event: seen[event] for event in block.shared}
    return Macro(
        streams=tuple([Terms(i, _frozen(run.free[i])) for i in sorted(run.touched)]),
        events=tuple([(event, _frozen(value)) for event, value in run.events.items()]),
        sends=tuple([(name, _frozen(value)) for name, value in run.sends]),
        waits=tuple(run.externals),
        receives=tuple([event for block in blocks for event in block.receives]),
    )


def prune(macros: Sequence[Macro]) -> list[Macro]:
    """Drop terms that can never be the maximum, and ends of streams that no macro reads and that
    are never the last on their rank.

    If every block leaves a stream free no later than the compute stream, the stream is never free
    later than compute. A term of that stream is then redundant if there is a compute term with an
    equal or larger constant. The host runs ahead of compute, so its terms are kept.
    """
    ends = [{target: dict(terms) for target, terms in m.streams} for m in macros]
    trailing = {s for s in range(len(STREAMS)) if s != COMPUTE and _trails(s, ends)}

    def cut(terms: AffineTerms) -> AffineTerms:
        through = next((c for i, c in terms if i == COMPUTE), None) if len(terms) > 1 else None
        if through is not None:
            terms = tuple([t for t in terms if t[0] not in trailing or t[1] > through])
        return terms

    cuts = [
        Macro(
            streams=tuple([Terms(t, cut(terms)) for t, terms in m.streams]),
            events=tuple([(n, cut(terms)) for n, terms in m.events]),
            sends=tuple([(n, cut(terms)) for n, terms in m.sends]),
            waits=m.waits,
            receives=m.receives,
        )
        for m in macros
    ]
    every = (terms for m in cuts for _, terms in (*m.streams, *m.events, *m.sends))
    unread = trailing.difference(i for terms in every for i, _ in terms)
    return [m._replace(streams=tuple([t for t in m.streams if t[0] not in unread])) for m in cuts]


def _trails(stream: int, ends: Sequence[dict[int, Affine]]) -> bool:
    """Whether every block leaves the stream free no later than compute, given that the stream was
    free no later than compute at entry."""
    for end in ends:
        if stream not in end:
            continue
        compute = end.get(COMPUTE, {COMPUTE: 0.0})
        for key, value in end[stream].items():
            bound = compute.get(key, NEVER)
            if key == stream:
                bound = max(bound, compute.get(COMPUTE, NEVER))
            if value > bound:
                return False
    return True
