"""Chunk-level simulation: a rank's step is a walk over the macros of its blocks.

A macro (macro.py) is a block's exact (max, +) map.  Running a block then costs a few additions
instead of one per action.  The result equals the op-level simulation up to rounding for every plan,
with no restriction on overlap.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rematbench.program.program import Program, RankProgram, Step
from rematbench.simulate.macro import Macro, Motion, macro_of, motion_of, prune
from rematbench.simulate.rows import NEVER, RowBlock, rows_with
from rematbench.simulate.step import (
    Clock,
    MessageKey,
    Simulation,
    busy,
    compile_program,
    drive,
)
from rematbench.simulate.timing import Seconds, timings


class Runs(NamedTuple):
    """A rank's steps as runs: a run joins neighbouring steps of one (micro-batch, chunk).  `keys`:
    the blocks of each distinct run; `steps`: (index into `keys`, micro-batch, chunk) in order."""

    keys: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[int, int, int], ...]


MacroSteps = tuple[list[Motion], Runs]
"""The motion of each distinct run of a rank, and the runs."""


def rank_macros(
    rank: RankProgram, code: Sequence[RowBlock], known: dict[tuple[int, ...], Macro]
) -> MacroSteps:
    """A rank's steps as motions, without events that no other macro waits for.

    `known`: macros by the compiled blocks that they fuse, shared by the ranks of a program."""
    runs = _runs(rank.steps, tuple([_role(block) for block in code]))
    macros = prune([_fused([code[i] for i in key], known) for key in runs.keys])
    awaited = {name for macro in macros for name in macro.waits}
    return [motion_of(macro, awaited) for macro in macros], runs


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
def _runs(steps: tuple[Step, ...], roles: tuple[int, ...]) -> Runs:
    """The runs of a rank's steps; `roles`: of its blocks."""
    keys: dict[tuple[int, ...], int] = {}
    runs: list[tuple[int, int, int]] = []
    run: list[int] = []
    at, where = -1, -1
    for block, micro_batch, chunk in steps:
        role = roles[block]
        if role == STILL:
            continue
        if micro_batch != at or chunk != where or role == STARTS:
            if run:
                runs.append((keys.setdefault(tuple(run), len(keys)), at, where))
            run, at, where = [], micro_batch, chunk
        run.append(block)
    if run:
        runs.append((keys.setdefault(tuple(run), len(keys)), at, where))
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
    """Run macros until the rank is done (True) or a message is missing (False).  The loops are
    plain because every simulation spends its time here."""
    events, free = clock.events, clock.free
    motions, (_, steps) = own
    for position in range(clock.position, len(steps)):
        index, micro_batch, chunk = steps[position]
        ends, streams, recorded, sends, waits = motions[index]
        inputs = _inputs(waits, clock, messages, micro_batch, chunk) if waits else free
        if inputs is None:
            clock.position = position
            return False
        times = []
        for terms in ends:
            latest = NEVER
            for term, constant in terms:
                at = inputs[term] + constant
                if at > latest:  # noqa: PLR1730  max() takes twice as long
                    latest = at
            times.append(latest)
        for name, end in recorded:
            events[name, micro_batch, chunk] = times[end]
        for name, end in sends:
            messages[clock.outgoing(name, micro_batch, chunk)] = times[end]
        for stream, end in streams:
            free[stream] = times[end]
    return True


def _inputs(
    waits: tuple[tuple[str, bool], ...],
    clock: Clock,
    messages: dict[MessageKey, float],
    micro_batch: int,
    chunk: int,
) -> list[float] | None:
    """The inputs of a macro that waits for outside events; None where a message is missing, which
    the clock then awaits."""
    inputs = clock.free.copy()
    for name, message in waits:
        if not message:
            inputs.append(clock.events[name, micro_batch, chunk])
            continue
        key = clock.incoming(name, micro_batch, chunk)
        if key not in messages:
            clock.awaiting = key
            return None
        inputs.append(messages[key])
    return inputs
