"""Plans that are lowered, and the bytes that the allocator of their fullest rank reserves."""

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import NamedTuple

from rematbench.choose.candidates import same_plan
from rematbench.lowering.lower import lower
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.program.allocator import AllocatorPeaks, Mode
from rematbench.program.program import Program
from rematbench.program.replay import replay
from rematbench.simulate.evaluate import RankBytes, fullest_rank, program_bytes
from rematbench.solve.memory_plan import planned_peak


class Reserved(NamedTuple):
    """Bytes that an allocator reserves (`at_least`: or more); `pressed`: with cached segments given
    back for that."""

    nbytes: int
    pressed: bool = False
    at_least: bool = False


class Lowered:
    """A plan's program, the bytes of its ranks, and the allocator's peaks on a device with
    unlimited memory, each made once.  No cluster changes them."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        self.held: dict[int, Reserved] = {}  # what `weighed` found, by usable bytes
        self._ended: AllocatorPeaks | None = None  # of a replay that ended early

    @cached_property
    def program(self) -> Program:
        """The lowered plan."""
        return lower(self.plan, self.problem)

    def forget(self, most_actions: int) -> None:
        """Forget a program with more actions in memory, which is lowered again where it is asked
        for."""
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
        """What the fullest rank needs where the plan places its activations itself; else 0."""
        rank = fullest_rank(self.ranks)
        return _placed_bytes(self.program, rank, self.ranks[rank])

    @cached_property
    def peaks(self) -> AllocatorPeaks:
        """The allocator's peaks on a device with unlimited memory."""
        rank = fullest_rank(self.ranks)
        return unpressed(self.program, rank, self.ranks[rank])

    def peaks_until(self, enough_bytes: float) -> AllocatorPeaks:
        """`peaks`, or those of a replay that ended once more than `enough_bytes` were reserved."""
        ended = self._ended
        if "peaks" in self.__dict__:
            return self.peaks
        if ended is None or ended.reserved_bytes <= enough_bytes:
            rank = fullest_rank(self.ranks)
            held = self.ranks[rank]
            found = replayed(self.program, rank, held, None, enough_bytes=enough_bytes)
            if not found.ended:
                self.peaks = found
                return found
            self._ended = ended = found
        return ended


_LATELY: deque[tuple[Problem, bytes, Lowered]] = deque(maxlen=8)


def lately(problem: Problem, plan: Plan) -> Lowered:
    """The lowered plan.  The last few are kept: a method weighs plans before it asks for the
    seconds of one of them, and notes in `fit` how it chose."""
    key = same_plan(plan)
    for of, content, lowered in _LATELY:
        if of is problem and content == key:
            return lowered
    _LATELY.append((problem, key, Lowered(problem, plan)))
    return _LATELY[-1][-1]


def weighed(problem: Problem, lowered: Lowered, room_bytes: float = inf) -> Reserved:
    """What the allocator of a plan's fullest rank reserves.  A plan with more live bytes than
    `room_bytes` is not replayed: no allocator needs less."""
    if lowered.live_bytes > room_bytes:
        return Reserved(lowered.live_bytes)
    at = problem.usable_bytes
    if at not in lowered.held:
        known = lowered.placed_bytes or lowered.peaks.reserved_bytes
        lowered.held[at] = (
            Reserved(known)
            if lowered.placed_bytes or known <= at
            else reserved(problem, lowered.program, lowered.ranks, lowered.peaks)
        )
    return lowered.held[at]


def weighed_until(problem: Problem, lowered: Lowered, room_bytes: float) -> Reserved:
    """As `weighed`; of a plan that reserves more than `room_bytes` only that it does, because the
    replay ends there."""
    at = problem.usable_bytes
    if lowered.live_bytes > room_bytes or at in lowered.held or lowered.placed_bytes:
        return weighed(problem, lowered, room_bytes)
    found = lowered.peaks_until(room_bytes)
    if not found.ended:
        return weighed(problem, lowered, room_bytes)
    if found.reserved_bytes > at:  # too much at once: cached segments may be released for it
        rank = fullest_rank(lowered.ranks)
        pressed = replayed(lowered.program, rank, lowered.ranks[rank], at)
        if pressed.oom_at is None:
            return lowered.held.setdefault(at, Reserved(pressed.reserved_bytes, pressed=True))
    return Reserved(found.reserved_bytes, at_least=True)


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


def reserved(
    problem: Problem,
    program: Program,
    ranks: Sequence[RankBytes],
    known: AllocatorPeaks | None = None,
) -> Reserved:
    """What the fullest rank's allocator reserves, by replay. `known`: the peaks that `unpressed`
    found for that rank."""
    rank = fullest_rank(ranks)
    return rank_reserved(program, rank, ranks[rank], problem.usable_bytes, known)


def rank_reserved(
    program: Program,
    rank: int,
    held: RankBytes,
    usable_bytes: int,
    known: AllocatorPeaks | None = None,
) -> Reserved:
    """What one rank's allocator reserves, by replay.

    `known`: the rank's peaks on a device with unlimited memory. An allocator that reaches the
    usable bytes releases cached segments and tries again: only where the retry fails too is the
    rank out of memory, and then the reserved bytes are those of unlimited memory. Where the plan
    places its activations itself, the bytes of that placement count.
    """
    if placed := _placed_bytes(program, rank, held):
        return Reserved(placed)
    found = known or replayed(program, rank, held, None)
    if found.reserved_bytes > usable_bytes >= found.allocated_bytes:
        pressed = replayed(program, rank, held, usable_bytes)
        if pressed.oom_at is None:
            return Reserved(pressed.reserved_bytes, pressed=True)
    return Reserved(found.reserved_bytes)


def _placed_bytes(program: Program, rank: int, held: RankBytes) -> int:
    planned = planned_peak(program.ranks[rank]) if program.planned else 0
    return planned and held.parameter + held.gradient + held.optimizer + planned
