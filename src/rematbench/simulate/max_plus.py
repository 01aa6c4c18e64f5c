"""Chunk-level simulation: each block becomes one macro, exact in (max, +) algebra.

Inside a block every end time is a maximum of (input time + constant).  Inputs are the times at
which the streams and the host are free at entry, and the times of outside events that the block
waits for.  So a block is a small (max, +) matrix, computed once; running the block costs a few
additions instead of one per action.  The result equals the op-level simulation up to rounding for
every plan, with no restriction on overlap.  (Baccelli, Cohen, Olsder, Quadrat 1992,
Synchronization and Linearity, for the algebra.)
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rematbench.program.action import STREAM_INDEX, STREAMS, is_local
from rematbench.program.program import Program, RankProgram, Step
from rematbench.simulate.rows import NEVER, Row, RowBlock, rows_of
from rematbench.simulate.step import (
    HOST,
    Clock,
    MessageKey,
    Simulation,
    busy,
    compile_program,
    drive,
)
from rematbench.simulate.timing import Seconds

Affine = dict[int, float]
"""A maximum of (input + constant): the constant by input index.  Inputs are the streams, the host,
then external events."""

COMPUTE = STREAM_INDEX["compute"]

AffineTerms = tuple[tuple[int, float], ...]
"""The (input index, constant) pairs of an Affine, as tuples for the inner loop."""


class Terms(NamedTuple):
    """An output of a block: the index of a stream or the host, and the time at which it is free."""

    target: int
    terms: AffineTerms


class Macro(NamedTuple):
    """A block as a (max, +) map: the ends of streams, the times of events and messages (by
    direction), the external events that it waits for, and those of them that are messages."""

    streams: tuple[Terms, ...]
    events: tuple[tuple[str, AffineTerms], ...]
    sends: tuple[tuple[str, AffineTerms], ...]
    waits: tuple[str, ...]
    receives: tuple[str, ...]


Shifted = tuple[Affine, float]
"""A maximum, and seconds to add to each of its terms: kernels in a row change the seconds alone."""


def _join(a: Shifted, b: Shifted) -> Shifted:
    """The maximum of two times; the object `a` where `b` is never later."""
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


def _frozen(value: Shifted) -> AffineTerms:
    terms, shift = value
    return tuple([(key, at + shift) for key, at in terms.items()])


class _Run:
    """The symbolic run of blocks: when streams and the host are free, and the events so far."""

    def __init__(self) -> None:
        self.free: list[Shifted] = [({i: 0.0}, 0.0) for i in range(HOST + 1)]
        self.touched: set[int] = set()
        self.externals: dict[str, int] = {}
        self.events: dict[str, Shifted] = {}
        self.sends: list[tuple[str, Shifted]] = []

    def part(self, rows: tuple[Row, ...], seen: dict[str, Shifted]) -> None:
        """Issue and run the rows of a part; `seen`: the times of the events so far, to which the
        part's are added.  The loop is plain because every simulation spends its time here."""
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

    def _issued(self, start: Shifted, issue: float, late: float) -> Shifted:
        """The start of a row that the host issues."""
        terms, shift = self.free[HOST]
        self.free[HOST] = (terms, shift + issue)
        self.touched.add(HOST)
        return _join(start, (terms, shift + late))

    def _held(self, end: Shifted) -> None:
        """The host waits until a row has ended."""
        self.free[HOST] = _join(self.free[HOST], end)
        self.touched.add(HOST)

    def _awaited(self, event: str, seen: dict[str, Shifted]) -> Shifted:
        """The time of an event; a new external input where no earlier row recorded the event."""
        if event not in seen:
            self.externals[event] = HOST + 1 + len(self.externals)
            seen[event] = ({self.externals[event]: 0.0}, 0.0)
        return seen[event]


def macro_of(*blocks: RowBlock) -> Macro:
    """The macro of blocks that are issued one after the other.  Local events are known only inside
    their block."""
    run = _Run()
    seen: dict[str, Shifted] = {}
    for block in blocks:
        seen = {name: value for name, value in seen.items() if not is_local(name)}
        for rows, carried in block.parts:
            seen |= [(name, seen[before]) for name, before in carried]
            run.part(rows, seen)
        run.events |= {name: seen[name] for name in block.shared}
    return Macro(
        streams=tuple([Terms(i, _frozen(run.free[i])) for i in sorted(run.touched)]),
        events=tuple([(name, _frozen(value)) for name, value in run.events.items()]),
        sends=tuple([(name, _frozen(value)) for name, value in run.sends]),
        waits=tuple(run.externals),
        receives=tuple([name for block in blocks for name in block.receives]),
    )


def prune(macros: Sequence[Macro]) -> list[Macro]:
    """The macros without terms that can never be the maximum.

    If every block leaves a stream free no later than the compute stream, the stream's free time
    never exceeds the compute stream's.  A term of that stream is then dominated by a compute term
    with an equal or larger constant.  The host runs ahead of compute, so its terms are kept.
    """
    ends = [{target: dict(terms) for target, terms in m.streams} for m in macros]
    trailing = {s for s in range(len(STREAMS)) if s != COMPUTE and _trails(s, ends)}

    def cut(terms: AffineTerms) -> AffineTerms:
        if len(terms) == 1:
            return terms
        through = next((c for i, c in terms if i == COMPUTE), None)
        if through is None:
            return terms
        return tuple(t for t in terms if t[0] not in trailing or t[1] > through)

    return [
        Macro(
            streams=tuple(Terms(t, cut(terms)) for t, terms in m.streams),
            events=tuple((n, cut(terms)) for n, terms in m.events),
            sends=tuple((n, cut(terms)) for n, terms in m.sends),
            waits=m.waits,
            receives=m.receives,
        )
        for m in macros
    ]


def _trails(stream: int, ends: Sequence[dict[int, Affine]]) -> bool:
    """Whether every block leaves the stream free no later than compute, if it was at entry."""
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


class Motion(NamedTuple):
    """A macro for the inner loop: every distinct end time once, and the streams, events and
    messages that take each (by index into `ends`)."""

    ends: tuple[AffineTerms, ...]
    streams: tuple[tuple[int, int], ...]  # stream, index into ends
    events: tuple[tuple[str, int], ...]
    sends: tuple[tuple[str, int], ...]
    waits: tuple[tuple[str, bool], ...]  # event, whether it is a message's arrival


def motion_of(macro: Macro, awaited: set[str]) -> Motion | None:
    """The motion of a macro, without the events that no macro waits for (`awaited`: those that one
    waits for); None where the macro has no effect."""
    ends: dict[AffineTerms, int] = {}

    def index(terms: AffineTerms) -> int:
        return ends.setdefault(terms, len(ends))

    streams = tuple([(target, index(terms)) for target, terms in macro.streams])
    events = tuple([(name, index(terms)) for name, terms in macro.events if name in awaited])
    sends = tuple([(name, index(terms)) for name, terms in macro.sends])
    waits = tuple([(name, name in macro.receives) for name in macro.waits])
    return Motion(tuple(ends), streams, events, sends, waits) if ends else None


class Runs(NamedTuple):
    """A rank's steps as runs: a run joins neighbouring steps of one (micro-batch, chunk).  `keys`:
    the blocks of each distinct run; `steps`: (index into `keys`, micro-batch, chunk) in order."""

    keys: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[int, int, int], ...]


MacroSteps = tuple[list[Motion | None], Runs]
"""The motion of each distinct run of a rank (None: the run has no effect), and the runs."""


def rank_macros(
    rank: RankProgram, code: Sequence[RowBlock], known: dict[tuple[int, ...], Macro]
) -> MacroSteps:
    """A rank's steps as motions, without events that no other macro waits for.

    `known`: macros by the compiled blocks that they fuse, shared by the ranks of a program."""
    runs = _runs(rank.steps, tuple([bool(block.receives) for block in code]))
    macros = prune([_fused([code[i] for i in key], known) for key in runs.keys])
    awaited = {name for macro in macros for name in macro.waits}
    return [motion_of(macro, awaited) for macro in macros], runs


@lru_cache(maxsize=64)
def _runs(steps: tuple[Step, ...], starts: tuple[bool, ...]) -> Runs:
    """The runs of a rank's steps.  A block that receives a message starts a new run (`starts`, by
    block): a message sent before it must leave while the block waits."""
    keys: dict[tuple[int, ...], int] = {}
    runs: list[tuple[int, int, int]] = []
    run: list[int] = []
    at, where = -1, -1
    for block, micro_batch, chunk in steps:
        if micro_batch != at or chunk != where or starts[block]:
            if run:
                runs.append((keys.setdefault(tuple(run), len(keys)), at, where))
            run, at, where = [], micro_batch, chunk
        run.append(block)
    runs.append((keys.setdefault(tuple(run), len(keys)), at, where))
    return Runs(tuple(keys), tuple(runs))


def _fused(blocks: Sequence[RowBlock], known: dict[tuple[int, ...], Macro]) -> Macro:
    key = tuple(id(block) for block in blocks)
    if key not in known:
        known[key] = macro_of(*blocks)
    return known[key]


def simulate_chunks(program: Program, seconds: Seconds) -> Simulation:
    """Chunk-level times of a program (equal to `simulate` up to rounding)."""
    code = compile_program(program, seconds, lambda b, rank: rows_of(b, rank, seconds))
    known: dict[tuple[int, ...], Macro] = {}
    steps = [rank_macros(r, c, known) for r, c in zip(program.ranks, code, strict=True)]
    clocks = [Clock(r.rank, program.pp) for r in program.ranks]
    messages: dict[MessageKey, float] = {}

    def advance(rank: RankProgram, clock: Clock) -> bool:
        return _advance(steps[rank.rank], clock, messages)

    drive(program, clocks, messages, advance)
    return Simulation(
        step_s=max(max(clock.free) for clock in clocks),
        rank_end_s=tuple(max(clock.free) for clock in clocks),
        stream_busy_s=busy(program, code),
    )


def _advance(own: MacroSteps, clock: Clock, messages: dict[MessageKey, float]) -> bool:
    """Run macros until the rank is done (True) or a message is missing (False)."""
    events, free = clock.events, clock.free
    motions, (_, steps) = own
    for position in range(clock.position, len(steps)):
        index, micro_batch, chunk = steps[position]
        motion = motions[index]
        if motion is None:
            continue
        ends, streams, recorded, sends, waits = motion
        inputs = free
        if waits:
            inputs = free.copy()
            for name, message in waits:
                if message:
                    key = clock.incoming(name, micro_batch, chunk)
                    if key not in messages:
                        clock.awaiting, clock.position = key, position
                        return False
                    inputs.append(messages[key])
                else:
                    inputs.append(events[name, micro_batch, chunk])
        times = _latest(ends, inputs)
        for name, end in recorded:
            events[name, micro_batch, chunk] = times[end]
        for name, end in sends:
            messages[clock.outgoing(name, micro_batch, chunk)] = times[end]
        for stream, end in streams:
            free[stream] = times[end]
    return True


def _latest(ends: tuple[AffineTerms, ...], inputs: Sequence[float]) -> list[float]:
    """The time of every end.  The loops are plain because every simulation spends its time here."""
    times = []
    for terms in ends:
        latest = NEVER
        for index, constant in terms:
            at = inputs[index] + constant
            if at > latest:  # noqa: PLR1730  max() takes twice as long
                latest = at
        times.append(latest)
    return times
