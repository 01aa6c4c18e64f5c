"""The evaluator, which lowers each plan once and computes each of its numbers once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial
from math import inf
from typing import NamedTuple

import msgspec
from msgspec.json import encode
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.allocator import AllocatorPeaks, Mode
from rematbench.engine.program.program import Program
from rematbench.engine.program.replay import replay
from rematbench.evaluate.breakdown import parts_of
from rematbench.evaluate.evaluation import (
    PlanEvaluation,
    RankBytes,
    evaluate_program,
    fullest_rank,
    program_bytes,
)
from rematbench.plan import Plan
from rematbench.problem import Problem, Weight
from rematbench.solve.memory_plan import planned_peak

# -- lowered plans -------------------------------------------------------------------------------


def same_plan(plan: Plan) -> bytes:
    """Return a key that is equal for plans with the same decisions; `fit` does not count."""
    return msgspec.json.encode(replace(plan, fit={}))


class Reserved(NamedTuple):
    """The bytes that an allocator reserves.  `at_least`: the true number may be higher.  `pressed`:
    the allocator had to give cached segments back."""

    nbytes: int
    pressed: bool = False
    at_least: bool = False


class Lowered:
    """A plan's program, the bytes of its ranks, and the allocator's peaks on a device with
    unlimited memory, each computed once.  None of them depends on the cluster.  `evaluations` and
    `parts_s` cache further numbers, by the facts on which they depend."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        self.held: dict[int, Reserved] = {}  # results of `weighed` by usable bytes
        self.evaluations: dict[bytes, PlanEvaluation] = {}
        self.parts_s: dict[tuple[bytes, float], dict[str, float]] = {}
        self._peaks: AllocatorPeaks | None = None  # the replay may have ended early

    @cached_property
    def program(self) -> Program:
        return lower(self.plan, self.problem)

    def forget(self, most_actions: int) -> None:
        """Drop a program with more than `most_actions` actions in memory.  The next use lowers the
        plan again."""
        program: Program | None = self.__dict__.get("program")
        if program is not None and program.written > most_actions:
            del self.program

    @cached_property
    def ranks(self) -> tuple[RankBytes, ...]:
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
        """The bytes of the fullest rank if the plan places its activations itself; otherwise 0."""
        rank = fullest_rank(self.ranks)
        return _placed_bytes(self.program, rank, self.ranks[rank])

    @property
    def peaks(self) -> AllocatorPeaks:
        """The allocator's peaks on a device with unlimited memory."""
        return self.peaks_until(inf)

    def peaks_until(self, enough_bytes: float) -> AllocatorPeaks:
        """Return `peaks`, or those of a replay that ended once more than `enough_bytes` were
        reserved."""
        known = self._peaks
        if known is None or (known.ended and known.reserved_bytes <= enough_bytes):
            known = self._peaks = self.replayed(enough_bytes=enough_bytes)
        return known

    def replayed(
        self, capacity_bytes: int | None = None, enough_bytes: float = inf
    ) -> AllocatorPeaks:
        rank = fullest_rank(self.ranks)
        held = self.ranks[rank]
        return replayed(self.program, rank, held, capacity_bytes, enough_bytes=enough_bytes)


def weighed(
    problem: Problem, lowered: Lowered, room_bytes: float = inf, enough_bytes: float = inf
) -> Reserved:
    """Return the bytes that the allocator of a plan's fullest rank reserves.  A plan with more live
    bytes than `room_bytes` is not replayed, because no allocator needs fewer bytes.  A replay ends
    once more than `enough_bytes` are reserved; the result is then a lower bound (`at_least`)."""
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


def replayed(
    program: Program,
    rank: int,
    held: RankBytes,
    capacity_bytes: int | None = None,
    *,
    whole: bool = False,
    enough_bytes: float = inf,
) -> AllocatorPeaks:
    """Return the allocator peaks of a rank over two training steps on a device of `capacity_bytes`
    (None: unlimited).  The second step finds the segments that the first step left cached, and may
    need others.  Unless `whole`, only the beginning of each step is replayed: up to twice the
    passes that lead to the peak, and two more.  By then the schedule has run for as long as its
    warm-up and for more than a period, and the pattern of blocks repeats (tests compare with all
    passes).  The replay ends once more than `enough_bytes` are reserved."""
    actions = program.ranks[rank]
    resident = held.blocks(actions.late)
    mode: Mode = "expandable" if program.expandable else "default"
    passes = None if whole else 2 * held.peak_step + 3
    if passes and actions.late:
        passes += 1  # in the second micro-batch all gradients are alive
    return replay(actions, resident, capacity_bytes, mode, passes, 2, enough_bytes)


def reserved(problem: Problem, program: Program, ranks: Sequence[RankBytes]) -> Reserved:
    """Return the bytes that the fullest rank's allocator reserves, by replay."""
    rank = fullest_rank(ranks)
    return rank_reserved(program, rank, ranks[rank], problem.usable_bytes)


def rank_reserved(program: Program, rank: int, held: RankBytes, usable_bytes: int) -> Reserved:
    """Return the bytes that a rank's allocator reserves, by replay.  If the plan places its
    activations itself, return the bytes of that placement."""
    if placed := _placed_bytes(program, rank, held):
        return Reserved(placed)
    replay_at = partial(replayed, program, rank, held)
    return _within(usable_bytes, replay_at(), replay_at)


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


# -- evaluators ----------------------------------------------------------------------------------

KEPT_PROGRAMS = 8
"""Programs that the evaluator of single problems keeps.  A method weighs several plans before it
needs the seconds of one of them, and writes its reasons into `fit`."""

Same = Callable[[Problem], Hashable]
"""A key that is equal for problems that share lowered plans."""


def without_cluster(problem: Problem) -> Hashable:
    """Return a key that is equal for problems that differ only in their cluster.  A program depends
    on the cluster only through the overlap that its links allow, which is part of the key."""
    same = (problem.workload, problem.system, problem.layout, problem.attention)
    return encode((*same, problem.tp_overlap))


class Evaluator:
    """Lowered plans and their numbers.  Problems with equal keys `same` share a lowered plan
    (default: no two problems do).  The last `kept` lowered plans stay (None: all).  Plans with more
    live bytes than usable bytes are replayed only with `replay_all`, because no allocator needs
    fewer bytes."""

    def __init__(
        self, same: Same = id, kept: int | None = None, *, replay_all: bool = False
    ) -> None:
        self._same, self._kept, self._replay_all = same, kept, replay_all
        self._lowered: OrderedDict[tuple[Hashable, bytes], Lowered] = OrderedDict()

    def lowered(self, problem: Problem, plan: Plan) -> Lowered:
        """Return the plan's program and bytes.  They refer to the problem, so its `id` stays
        unique."""
        key = self._same(problem), same_plan(plan)
        if key not in self._lowered:
            self._lowered[key] = Lowered(problem, plan)
            if self._kept is not None and len(self._lowered) > self._kept:
                self._lowered.popitem(last=False)
        return self._lowered[key]

    def reserved(self, problem: Problem, plan: Plan) -> Reserved:
        """Return the bytes that the allocator of the plan's fullest rank reserves on the cluster's
        devices."""
        room_bytes = inf if self._replay_all else problem.usable_bytes
        return weighed(problem, self.lowered(problem, plan), room_bytes)

    def weigh(self, problem: Problem, plan: Plan) -> Weight:
        """Return the bytes of a plan.  Can be the `weigher` of problems."""
        reserved = self.reserved(problem, plan)
        return Weight(self.lowered(problem, plan).peak_device_bytes, reserved.nbytes)

    def evaluate(self, problem: Problem, plan: Plan) -> PlanEvaluation:
        """Evaluate a plan at the chunk level, with the allocator's bytes.  Can be the `evaluator`
        of problems."""
        lowered, key = self.lowered(problem, plan), encode(problem.cluster)
        if key not in lowered.evaluations:
            held = self.reserved(problem, plan)
            lowered.evaluations[key] = timed(problem, lowered, held)
        return lowered.evaluations[key]

    def parts_s(self, problem: Problem, plan: Plan, step_s: float) -> dict[str, float]:
        """Return the seconds of the parts of a step that takes `step_s`."""
        lowered, key = self.lowered(problem, plan), (encode(problem.cluster), step_s)
        if key not in lowered.parts_s:
            lowered.parts_s[key] = parts_of(problem, lowered.program, step_s)
        return lowered.parts_s[key]


SINGLE_EVALUATOR = Evaluator(kept=KEPT_PROGRAMS, replay_all=True)
"""The evaluator of problems that share no lowered plan."""


def evaluate(problem: Problem, plan: Plan) -> PlanEvaluation:
    """Evaluate a plan for a single problem."""
    return SINGLE_EVALUATOR.evaluate(problem, plan)


def weigh(problem: Problem, plan: Plan) -> Weight:
    """Weigh a plan for a single problem."""
    return SINGLE_EVALUATOR.weigh(problem, plan)


def timed(problem: Problem, lowered: Lowered, held: Reserved) -> PlanEvaluation:
    """Return the evaluation of a lowered plan whose allocator reserves `held`."""
    evaluation = evaluate_program(problem, lowered.plan, lowered.program, ranks=lowered.ranks)
    return replace(evaluation, reserved_bytes=held.nbytes, pressed=held.pressed)
