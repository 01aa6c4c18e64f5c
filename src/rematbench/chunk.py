"""Chunk-level simulation: each block becomes one macro, exact in (max, +) algebra.

Inside a block every end time is a maximum of (input time + constant): inputs are the streams'
free times at entry and the events it waits for from outside.  So a block is a small (max, +)
matrix, computed once, and running it costs a few additions instead of one per action.  The result
equals the op-level simulation up to rounding for every plan, with no restriction on overlap.
(Baccelli, Cohen, Olsder, Quadrat 1992, Synchronization and Linearity, for the algebra.)
"""

from collections.abc import Sequence
from typing import NamedTuple

from rematbench.action import STREAM_INDEX, STREAMS
from rematbench.program import Program, RankProgram
from rematbench.simulate import (
    Clock,
    MessageKey,
    Seconds,
    Simulation,
    TimedBlock,
    busy,
    compile_program,
    drive,
)

Affine = dict[int, float]
"""A maximum of input + constant, by input index: streams first, then external events."""

COMPUTE = STREAM_INDEX["compute"]


class Terms(NamedTuple):
    """One output: the maximum over (input index, constant)."""

    target: int
    terms: tuple[tuple[int, float], ...]


class Macro(NamedTuple):
    """A block as a (max, +) map."""

    streams: tuple[Terms, ...]
    events: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
    sends: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
    waits: tuple[str, ...]
    receives: tuple[str, ...]

    @property
    def idle(self) -> bool:
        """Whether running it changes nothing in time."""
        return not (self.streams or self.events or self.sends)


def _join(a: Affine, b: Affine) -> Affine:
    merged = dict(a)
    for key, value in b.items():
        if value > merged.get(key, float("-inf")):
            merged[key] = value
    return merged


def macro_of(block: TimedBlock) -> Macro:
    """Run a block symbolically."""
    free: list[Affine] = [{i: 0.0} for i in range(len(STREAMS))]
    local: dict[str, Affine] = {}
    externals: dict[str, int] = {}
    events: dict[str, Affine] = {}
    sends: list[tuple[str, Affine]] = []
    touched: set[int] = set()
    for item in block.items:
        joined = free[item.stream]
        if item.wait:
            if item.wait not in local:
                externals[item.wait] = len(STREAMS) + len(externals)
                local[item.wait] = {externals[item.wait]: 0.0}
            joined = _join(joined, local[item.wait])
        if item.begin:
            local[item.begin] = joined
        if item.seconds:
            joined = {key: value + item.seconds for key, value in joined.items()}
        if item.event:
            local[item.event] = joined
        if item.shared:
            events[item.event] = joined
        if item.send:
            sends.append((item.send, joined))
        if joined != free[item.stream]:
            touched.add(item.stream)
        free[item.stream] = joined
    return Macro(
        streams=tuple(Terms(i, tuple(free[i].items())) for i in sorted(touched)),
        events=tuple((name, tuple(value.items())) for name, value in events.items()),
        sends=tuple((name, tuple(value.items())) for name, value in sends),
        waits=tuple(externals),
        receives=block.receives,
    )


def prune(macros: Sequence[Macro]) -> list[Macro]:
    """Drop terms that can never win: streams that every block leaves no later than compute.

    If in every block a stream's end is bounded by the compute stream's, its free time never exceeds
    compute's, so a term through it with a smaller constant than compute's is dominated.
    """
    trailing = {s for s in range(len(STREAMS)) if s != COMPUTE and _trails(s, macros)}

    def cut(terms: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        through = dict(terms).get(COMPUTE)
        if through is None:
            return terms
        return tuple((i, c) for i, c in terms if i not in trailing or c > through)

    return [
        m._replace(
            streams=tuple(Terms(t, cut(terms)) for t, terms in m.streams),
            events=tuple((n, cut(terms)) for n, terms in m.events),
            sends=tuple((n, cut(terms)) for n, terms in m.sends),
        )
        for m in macros
    ]


def _trails(stream: int, macros: Sequence[Macro]) -> bool:
    for macro in macros:
        ends = {t: dict(terms) for t, terms in macro.streams}
        if stream not in ends:
            continue
        compute = ends.get(COMPUTE, {COMPUTE: 0.0})
        for key, value in ends[stream].items():
            bound = compute.get(key, float("-inf"))
            if key == stream:
                bound = max(bound, compute.get(COMPUTE, float("-inf")))
            if value > bound:
                return False
    return True


def simulate_chunks(program: Program, seconds: Seconds) -> Simulation:
    """Chunk-level times of a program (equal to `simulate` up to rounding)."""
    code = compile_program(program, seconds)
    macros = [prune([macro_of(block) for block in blocks]) for blocks in code]
    clocks = [Clock(r.rank, program.pp) for r in program.ranks]
    messages: dict[MessageKey, float] = {}

    def advance(rank: RankProgram, clock: Clock) -> bool:
        return _advance(rank, clock, macros[rank.rank], messages)

    drive(program, clocks, messages, advance)
    return Simulation(
        step_s=max(max(clock.free) for clock in clocks),
        rank_end_s=tuple(max(clock.free) for clock in clocks),
        stream_busy_s=busy(program, code),
    )


def _advance(
    rank: RankProgram,
    clock: Clock,
    macros: list[Macro],
    messages: dict[MessageKey, float],
) -> bool:
    steps, events, free = rank.steps, clock.events, clock.free
    position, total = clock.position, len(rank.steps)
    while position < total:
        index, micro_batch, chunk = steps[position]
        macro = macros[index]
        if macro.idle:
            position += 1
            continue
        inputs = free
        if macro.waits:
            inputs = free.copy()
            for name in macro.waits:
                if name in macro.receives:
                    key = clock.incoming(name, micro_batch, chunk)
                    if key not in messages:
                        clock.awaiting, clock.position = key, position
                        return False
                    inputs.append(messages[key])
                else:
                    inputs.append(events[(name, micro_batch, chunk)])
        _apply(macro, inputs, clock, messages, micro_batch, chunk)
        position += 1
    clock.position = position
    return True


def _apply(
    macro: Macro,
    inputs: list[float],
    clock: Clock,
    messages: dict[MessageKey, float],
    micro_batch: int,
    chunk: int,
) -> None:
    for name, terms in macro.events:
        clock.events[(name, micro_batch, chunk)] = max([inputs[i] + c for i, c in terms])
    for name, terms in macro.sends:
        at = max([inputs[i] + c for i, c in terms])
        messages[clock.outgoing(name, micro_batch, chunk)] = at
    ends = [(target, max([inputs[i] + c for i, c in terms])) for target, terms in macro.streams]
    for target, at in ends:
        clock.free[target] = at
