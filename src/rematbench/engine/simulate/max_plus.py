"""Chunk-level simulation: a rank's step is a walk over the macros of its blocks.

A macro (macro.py) is the exact (max, +) map of a block.  Running a block then costs a few
additions, not one per action.  The result equals the op-level simulation up to rounding for every
plan, with no restriction on overlap.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rematbench.engine.program.program import Program, RankProgram, Step
from rematbench.engine.program.storage import Event
from rematbench.engine.simulate.block_rows import NEVER, RowBlock, rows_with
from rematbench.engine.simulate.macro import COMPUTE, AffineTerms, Macro, macro_of, prune
from rematbench.engine.simulate.op_level import (
    HOST,
    Clock,
    Seconds,
    Simulation,
    compile_program,
    drive,
    pass_number,
    simulation,
    timings,
)

Times = dict[int, float]


class Runs(NamedTuple):
    """A rank's steps as runs, each of which joins neighbouring steps of the same (micro-batch,
    chunk). `keys`: the blocks of each distinct run; `steps`: (index into `keys`, `pass_number`) in
    order."""

    keys: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[int, int], ...]


class Motion(NamedTuple):
    """A rank's macro in the form that the inner loop reads: each distinct end time once, and the
    streams, events and messages that have it (by index into `ends`). An event's times are stored by
    the number of the pass, and messages by a multiple of it plus an offset (`Clock`). `gate`: the
    times of an event, if the macro only makes compute wait for that event."""

    ends: tuple[AffineTerms, ...]
    streams: tuple[tuple[int, int], ...]  # (stream, index into `ends`)
    events: tuple[tuple[Times, int], ...]
    sends: tuple[tuple[int, int, int], ...]  # (scale, offset, index into `ends`)
    waits: tuple[tuple[Times | None, int, int], ...]  # (event's times or None, scale, offset)
    gate: Times | None


MacroSteps = tuple[list[Motion], Runs]


def _motion(macro: Macro, events: dict[Event, Times], clock: Clock) -> Motion:
    ends: dict[AffineTerms, int] = {}

    def index(terms: AffineTerms) -> int:
        return ends.setdefault(terms, len(ends))

    streams = tuple([(target, index(terms)) for target, terms in macro.streams])
    recorded = tuple([(events[n], index(terms)) for n, terms in macro.events if n in events])
    sends = tuple([(*clock.outgoing(name), index(terms)) for name, terms in macro.sends])
    waits = tuple(
        [
            (None, *clock.incoming(name)) if name in macro.receives else (events[name], 1, 0)
            for name in macro.waits
        ]
    )
    held = [*ends] == [((COMPUTE, 0.0), (HOST + 1, 0.0))] and streams == ((COMPUTE, 0),)
    alone = held and not (recorded or sends or macro.receives)
    return Motion(tuple(ends), streams, recorded, sends, waits, waits[0][0] if alone else None)


def rank_macros(
    rank: RankProgram, clock: Clock, code: Sequence[RowBlock], cache: dict[tuple[int, ...], Macro]
) -> MacroSteps:
    """Return a `Motion` for each distinct run of a rank's steps, and the runs in order. Events for
    which no macro waits are left out. `cache`: the macro of each sequence of compiled blocks; the
    ranks of a program share it."""
    runs = _runs(rank.steps, tuple([_role(block) for block in code]), clock.pp)
    macros = prune([_fused([code[i] for i in key], cache) for key in runs.keys])
    awaited: dict[Event, Times] = {event: {} for macro in macros for event in macro.waits}
    return [_motion(macro, awaited, clock) for macro in macros], runs


SKIPPED, JOINS, STARTS = range(3)
"""The role of a block in a run: none, because it only allocates or frees; it continues the run of
its micro-batch and chunk; it starts a new run."""


def _role(block: RowBlock) -> int:
    """A block that receives a message starts a new run: an earlier message must leave while it
    waits."""
    if block.receives:
        return STARTS
    return JOINS if any(part.rows for part in block.parts) else SKIPPED


@lru_cache(maxsize=64)
def _runs(steps: tuple[Step, ...], roles: tuple[int, ...], pp: int) -> Runs:
    keys: dict[tuple[int, ...], int] = {}
    runs: list[tuple[int, int]] = []
    run: list[int] = []
    at, where = -1, -1

    def end() -> None:
        if run:
            runs.append((keys.setdefault(tuple(run), len(keys)), pass_number(at, where, pp)))

    for block, micro_batch, chunk in steps:
        role = roles[block]
        if role == SKIPPED:
            continue
        if micro_batch != at or chunk != where or role == STARTS:
            end()
            run, at, where = [], micro_batch, chunk
        run.append(block)
    end()
    return Runs(tuple(keys), tuple(runs))


def _fused(blocks: Sequence[RowBlock], cache: dict[tuple[int, ...], Macro]) -> Macro:
    key = tuple(id(block) for block in blocks)
    if key not in cache:
        cache[key] = macro_of(*blocks)
    return cache[key]


def simulate_chunks(program: Program, seconds: Seconds) -> Simulation:
    """Return the chunk-level times of a program, equal to `simulate` up to rounding."""
    timing = timings(seconds)
    code = compile_program(program, seconds, lambda b, rank: rows_with(b, rank, timing))
    cache: dict[tuple[int, ...], Macro] = {}
    clocks = [Clock(r.rank, program.pp, program.embedding) for r in program.ranks]
    ranks = zip(program.ranks, clocks, code, strict=True)
    steps = [rank_macros(rank, clock, own, cache) for rank, clock, own in ranks]
    messages: Times = {}

    def advance(rank: RankProgram, clock: Clock) -> bool:
        return _advance(steps[rank.rank], clock, messages)

    drive(program, clocks, messages, advance)
    return simulation(program, clocks, code)


def _advance(own: MacroSteps, clock: Clock, messages: Times) -> bool:  # noqa: C901 (plain, for speed)
    """Run macros until the rank is done (True) or a message is missing (False).  The loops are
    plain because every simulation spends its time here."""
    free = clock.free
    motions, (_, steps) = own
    for position in range(clock.position, len(steps)):
        index, number = steps[position]
        ends, streams, recorded, sends, waits, gate = motions[index]
        if gate is not None:
            if (at := gate[number]) > free[COMPUTE]:
                free[COMPUTE] = at
            continue
        inputs = _inputs(waits, number, clock, messages) if waits else free
        if inputs is None:
            clock.position = position
            return False
        found = []
        for terms in ends:
            latest = NEVER
            for term, constant in terms:
                at = inputs[term] + constant
                if at > latest:  # noqa: PLR1730  max() takes twice as long
                    latest = at
            found.append(latest)
        for times, end in recorded:
            times[number] = found[end]
        for scale, offset, end in sends:
            messages[scale * number + offset] = found[end]
        for stream, end in streams:
            free[stream] = found[end]
    return True


def _inputs(
    waits: Sequence[tuple[Times | None, int, int]], number: int, clock: Clock, messages: Times
) -> list[float] | None:
    """The inputs of a macro that waits for outside events; None if a message is missing, whose
    number then is in `clock.awaiting`."""
    inputs = clock.free.copy()
    for times, scale, offset in waits:
        if times is not None:
            inputs.append(times[number])
            continue
        key = scale * number + offset
        if key not in messages:
            clock.awaiting = key
            return None
        inputs.append(messages[key])
    return inputs
