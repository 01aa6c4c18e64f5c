"""Chunk-level simulation: a rank's step is a walk over the macros of its blocks.

A macro (macro.py) is a block's exact (max, +) map.  Running a block then costs a few additions
instead of one per action.  The result equals the op-level simulation up to rounding for every plan,
with no restriction on overlap.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rematbench.program.program import Program, RankProgram, Step
from rematbench.simulate.macro import COMPUTE, AffineTerms, Macro, macro_of, prune
from rematbench.simulate.rows import NEVER, RowBlock, rows_with
from rematbench.simulate.step import (
    HOST,
    Clock,
    MessageKey,
    Simulation,
    busy,
    compile_program,
    drive,
)
from rematbench.simulate.timing import Seconds, timings

Times = dict[int, float]
"""Seconds by a number."""

APART = 1 << 20
"""The distance of two micro-batches in numbers of stages: more than any pipeline has stages."""


class Runs(NamedTuple):
    """A rank's steps as runs: a run joins neighbouring steps of one (micro-batch, chunk).  `keys`:
    the blocks of each distinct run; `steps`: (index into `keys`, number) in order.  The number is
    that of the chunk's stage on rank 0, APART after APART for each micro-batch."""

    keys: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[int, int], ...]


class Motion(NamedTuple):
    """A macro of one rank for the inner loop: every distinct end time once, and the streams, events
    and messages that take each (by index into `ends`).  The times of an event are by the number of
    `Runs`; the number of a message is `scale` times that plus `offset`.  `gate`: the event, if all
    that the macro does is to hold compute until then."""

    ends: tuple[AffineTerms, ...]
    streams: tuple[tuple[int, int], ...]  # stream, index into ends
    events: tuple[tuple[Times, int], ...]
    sends: tuple[tuple[int, int, int], ...]  # scale, offset, index into ends
    waits: tuple[
        tuple[Times | None, int, int], ...
    ]  # an event, or the scale and offset of a message
    gate: Times | None


MacroSteps = tuple[list[Motion], Runs]
"""The motion of each distinct run of a rank, and the runs."""


class Numbers(NamedTuple):
    """The numbers of a rank's messages: of a micro-batch and stage, twice the stage's number, plus
    one on the way back; of tied embeddings, one below zero for each sender."""

    rank: int
    pp: int

    def incoming(self, event: str) -> tuple[int, int]:
        """Scale and offset of the message whose arrival is the event of a RECV."""
        if event == "recv_e":
            return 0, self.rank - self.pp
        return 2, 2 * self.rank + (event == "recv_b")

    def outgoing(self, op: str) -> tuple[int, int]:
        """Scale and offset of the message of a SEND."""
        if op == "tied":
            return 0, -1 - self.rank
        return (2, 2 * self.rank + 2) if op == "f" else (2, 2 * self.rank - 1)


def _motion(macro: Macro, events: dict[str, Times], numbers: Numbers) -> Motion:
    """The motion of a macro; `events`: those that a macro of the rank waits for."""
    ends: dict[AffineTerms, int] = {}

    def index(terms: AffineTerms) -> int:
        return ends.setdefault(terms, len(ends))

    streams = tuple([(target, index(terms)) for target, terms in macro.streams])
    recorded = tuple([(events[n], index(terms)) for n, terms in macro.events if n in events])
    sends = tuple([(*numbers.outgoing(name), index(terms)) for name, terms in macro.sends])
    waits = tuple(
        [
            (None, *numbers.incoming(name)) if name in macro.receives else (events[name], 1, 0)
            for name in macro.waits
        ]
    )
    held = [*ends] == [((COMPUTE, 0.0), (HOST + 1, 0.0))] and streams == ((COMPUTE, 0),)
    alone = held and not (recorded or sends or macro.receives)
    return Motion(tuple(ends), streams, recorded, sends, waits, waits[0][0] if alone else None)


def rank_macros(
    rank: RankProgram, pp: int, code: Sequence[RowBlock], known: dict[tuple[int, ...], Macro]
) -> MacroSteps:
    """A rank's steps as motions, without events that no other macro waits for.

    `known`: macros by the compiled blocks that they fuse, shared by the ranks of a program."""
    runs = _runs(rank.steps, tuple([_role(block) for block in code]), pp)
    macros = prune([_fused([code[i] for i in key], known) for key in runs.keys])
    awaited: dict[str, Times] = {name: {} for macro in macros for name in macro.waits}
    return [_motion(macro, awaited, Numbers(rank.rank, pp)) for macro in macros], runs


STILL, JOINS, STARTS = range(3)
"""What a block does to a run: nothing (it only allocates or frees); goes on with the run of its
micro-batch and chunk; starts a new one."""


def _role(block: RowBlock) -> int:
    """A block that receives a message starts a new run: a message sent before it must leave while
    the block waits."""
    if block.receives:
        return STARTS
    return JOINS if any(part.rows for part in block.parts) else STILL


@lru_cache(maxsize=64)
def _runs(steps: tuple[Step, ...], roles: tuple[int, ...], pp: int) -> Runs:
    """The runs of a rank's steps; `roles`: of its blocks."""
    keys: dict[tuple[int, ...], int] = {}
    runs: list[tuple[int, int]] = []
    run: list[int] = []
    at, where = -1, -1

    def end() -> None:
        if run:
            runs.append((keys.setdefault(tuple(run), len(keys)), at * APART + where * pp))

    for block, micro_batch, chunk in steps:
        role = roles[block]
        if role == STILL:
            continue
        if micro_batch != at or chunk != where or role == STARTS:
            end()
            run, at, where = [], micro_batch, chunk
        run.append(block)
    end()
    return Runs(tuple(keys), tuple(runs))


def _fused(blocks: Sequence[RowBlock], known: dict[tuple[int, ...], Macro]) -> Macro:
    key = tuple(id(block) for block in blocks)
    if key not in known:
        known[key] = macro_of(*blocks)
    return known[key]


def simulate_chunks(program: Program, seconds: Seconds) -> Simulation:
    """Chunk-level times of a program (equal to `simulate` up to rounding)."""
    timing = timings(seconds)
    code = compile_program(program, seconds, lambda b, rank: rows_with(b, rank, timing))
    known: dict[tuple[int, ...], Macro] = {}
    steps = [rank_macros(r, program.pp, c, known) for r, c in zip(program.ranks, code, strict=True)]
    clocks = [Clock[int](r.rank, program.pp) for r in program.ranks]
    messages: Times = {}

    def advance(rank: RankProgram, clock: Clock[int]) -> bool:
        return _advance(steps[rank.rank], clock, messages)

    drive(program, clocks, messages, advance, _named)
    return Simulation(
        step_s=max(max(clock.free) for clock in clocks),
        rank_end_s=tuple(max(clock.free) for clock in clocks),
        stream_busy_s=busy(program, code),
    )


def _named(key: int) -> MessageKey:
    """A message by its direction, micro-batch and stage (for errors)."""
    if key < 0:
        return ("e", -1 - key, 0)
    return ("fb"[key % 2], *divmod(key // 2, APART))


def _advance(own: MacroSteps, clock: Clock[int], messages: Times) -> bool:  # noqa: C901
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
    waits: Sequence[tuple[Times | None, int, int]], number: int, clock: Clock[int], messages: Times
) -> list[float] | None:
    """The inputs of a macro that waits for outside events; None where a message is missing, which
    the clock then awaits."""
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
