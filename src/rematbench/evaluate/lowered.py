"""Plans that are lowered, and the bytes that the allocator of their fullest rank reserves."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import inf
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.allocator import AllocatorPeaks, Mode
from rematbench.engine.program.program import Program
from rematbench.engine.program.replay import replay
from rematbench.evaluate.evaluation import RankBytes, fullest_rank, program_bytes
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.solve.memory_plan import planned_peak


def same_plan(plan: Plan) -> bytes:
    """A key that is equal for plans with the same decisions; `fit` does not count."""
    return msgspec.json.encode(replace(plan, fit={}))


class Reserved(NamedTuple):
    """Bytes that an allocator reserves.  `at_least`: it may reserve more.  `pressed`: it had to
    give cached segments back."""

    nbytes: int
    pressed: bool = False
    at_least: bool = False


class Lowered:
    """A plan's program, the bytes of its ranks, and the allocator's peaks on a device with
    unlimited memory, each computed once.  No cluster changes them."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        self.held: dict[int, Reserved] = {}  # results of `weighed`, by usable bytes
        self._peaks: AllocatorPeaks | None = None  # possibly of a replay that ended early

    @cached_property
    def program(self) -> Program:
        """The lowered plan."""
        return lower(self.plan, self.problem)

    def forget(self, most_actions: int) -> None:
        """Drop a program with more than `most_actions` actions in memory; the next use lowers it
        again."""
        program: Program | None = self.__dict__.get("program")
        if program is not None and program.written > most_actions:
            del self.program

    @cached_property
    def ranks(self) -> tuple[RankBytes, ...]:
        """The bytes of every pipeline rank."""
        return program_bytes(self.problem, self.plan, self.program)

    @property
    def peak_device_bytes(self) -> tuple[int, ...]:
        """The ledger peak of every pipeline rank."""
        return tuple(rank.device_peak for rank in self.ranks)

    @cached_property
    def live_bytes(self) -> int:
        """The largest ledger peak of a device."""
        return max(self.peak_device_bytes)

    @cached_property
    def placed_bytes(self) -> int:
        """Bytes of the fullest rank if the plan places its activations itself; else 0."""
        rank = fullest_rank(self.ranks)
        return _placed_bytes(self.program, rank, self.ranks[rank])

    @property
    def peaks(self) -> AllocatorPeaks:
        """The allocator's peaks on a device with unlimited memory."""
        return self.peaks_until(inf)

    def peaks_until(self, enough_bytes: float) -> AllocatorPeaks:
        """`peaks`, or the peaks of a replay that ended once more than `enough_bytes` were
        reserved."""
        known = self._peaks
        if known is None or (known.ended and known.reserved_bytes <= enough_bytes):
            known = self._peaks = self.replayed(enough_bytes=enough_bytes)
        return known

    def replayed(
        self, capacity_bytes: int | None = None, enough_bytes: float = inf
    ) -> AllocatorPeaks:
        """A replay of the fullest rank."""
        rank = fullest_rank(self.ranks)
        held = self.ranks[rank]
        return replayed(self.program, rank, held, capacity_bytes, enough_bytes=enough_bytes)


def weighed(
    problem: Problem, lowered: Lowered, room_bytes: float = inf, enough_bytes: float = inf
) -> Reserved:
    """Bytes that the allocator of a plan's fullest rank reserves.  A plan with more live bytes than
    `room_bytes` is not replayed: no allocator needs fewer.  A replay ends once more than
    `enough_bytes` are reserved; the result is then a lower bound (`at_least`)."""
    if lowered.live_bytes > room_bytes:
        return Reserved(lowered.live_bytes)
    at = problem.usable_bytes
    if at not in lowered.held:
        if lowered.placed_bytes:
            found = Reserved(lowered.placed_bytes)
        else:
            found = _within(at, lowered.peaks_until(enough_bytes), lowered.replayed)
        if found.at_least:
            return found
        lowered.held[at] = found
    return lowered.held[at]


def unpressed(program: Program, rank: int, held: RankBytes) -> AllocatorPeaks:
    """The allocator peaks of a rank on a device with unlimited memory."""
    return replayed(program, rank, held, None)


def replayed(
    program: Program,
    rank: int,
    held: RankBytes,
    capacity_bytes: int | None,
    *,
    whole: bool = False,
    enough_bytes: float = inf,
) -> AllocatorPeaks:
    """The allocator peaks of one rank over two training steps: the second finds the segments that
    the first left cached, and may need others.  Of each (unless `whole`) up to twice the passes
    that lead to the peak, and the two that follow: by then the schedule has run for as long as its
    warm-up, more than a period, and the pattern of blocks repeats (tests compare with all passes).
    The replay ends where more than `enough_bytes` are reserved."""
    actions = program.ranks[rank]
    resident = held.blocks(actions.late)
    mode: Mode = "expandable" if program.expandable else "default"
    passes = None if whole else 2 * held.peak_step + 3
    if passes and actions.late:
        passes += 1  # through the second micro-batch, where all gradients are alive
    return replay(actions, resident, capacity_bytes, mode, passes, 2, enough_bytes)


def reserved(problem: Problem, program: Program, ranks: Sequence[RankBytes]) -> Reserved:
    """Bytes that the fullest rank's allocator reserves, by replay."""
    rank = fullest_rank(ranks)
    return rank_reserved(program, rank, ranks[rank], problem.usable_bytes)


def rank_reserved(program: Program, rank: int, held: RankBytes, usable_bytes: int) -> Reserved:
    """Bytes that a rank's allocator reserves, by replay.  If the plan places its activations
    itself, the bytes of that placement count."""
    if placed := _placed_bytes(program, rank, held):
        return Reserved(placed)
    peaks = unpressed(program, rank, held)
    return _within(usable_bytes, peaks, partial(replayed, program, rank, held))


def _within(
    usable_bytes: int, peaks: AllocatorPeaks, replay_at: Callable[[int], AllocatorPeaks]
) -> Reserved:
    """The bytes that an allocator with `peaks` on unlimited memory reserves of `usable_bytes`.  At
    this limit it releases cached segments and tries again (`replay_at`).  Only if the retry fails
    too is the rank out of memory; the result then has the bytes of unlimited memory."""
    if peaks.reserved_bytes > usable_bytes >= peaks.allocated_bytes:
        pressed = replay_at(usable_bytes)
        if pressed.oom_at is None:
            return Reserved(pressed.reserved_bytes, pressed=True)
    return Reserved(peaks.reserved_bytes, at_least=peaks.ended)


def _placed_bytes(program: Program, rank: int, held: RankBytes) -> int:
    planned = planned_peak(program.ranks[rank]) if program.planned else 0
    return planned and held.parameter + held.gradient + held.optimizer + planned
