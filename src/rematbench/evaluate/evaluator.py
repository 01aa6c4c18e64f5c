"""The evaluator: each plan is lowered once, and each of its numbers is computed once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from math import inf

from msgspec.json import encode
from msgspec.structs import replace

from rematbench.evaluate.breakdown import parts_of
from rematbench.evaluate.evaluation import PlanEvaluation, evaluate_program
from rematbench.evaluate.lowered import Lowered, Reserved, same_plan, weighed
from rematbench.plan import Plan
from rematbench.problem import Problem, Weight

RECENT = 8
"""Programs that the evaluator of single problems keeps: a method weighs plans before it asks for
the seconds of one of them, and notes in `fit` how it chose."""

Same = Callable[[Problem], Hashable]
"""A key that is equal for problems that share lowered plans."""


def without_cluster(problem: Problem) -> Hashable:
    """The key of all problems that differ in their cluster alone: no cluster changes a program."""
    return encode((problem.workload, problem.system, problem.layout, problem.attention))


class Evaluator:
    """Lowered plans and their numbers.  `same` tells which problems share a lowered plan (by
    default only a problem with itself); the last `kept` lowered plans stay (None: all).  Live bytes
    above the usable bytes are replayed only with `replay_all`: no allocator needs less."""

    def __init__(
        self, same: Same = id, kept: int | None = None, *, replay_all: bool = False
    ) -> None:
        self._same, self._kept, self._replay_all = same, kept, replay_all
        self._lowered: OrderedDict[tuple[Hashable, bytes], Lowered] = OrderedDict()

    def lowered(self, problem: Problem, plan: Plan) -> Lowered:
        """The plan's program and bytes.  It holds its problem, so a key by `id` stays its own."""
        key = self._same(problem), same_plan(plan)
        if key not in self._lowered:
            self._lowered[key] = Lowered(problem, plan)
            if self._kept is not None and len(self._lowered) > self._kept:
                self._lowered.popitem(last=False)
        return self._lowered[key]

    def reserved(self, problem: Problem, plan: Plan) -> Reserved:
        """What the allocator of the plan's fullest rank reserves on the cluster's devices."""
        room_bytes = inf if self._replay_all else problem.usable_bytes
        return weighed(problem, self.lowered(problem, plan), room_bytes)

    def weigh(self, problem: Problem, plan: Plan) -> Weight:
        """The bytes of a plan; can be the `weigher` of problems."""
        reserved = self.reserved(problem, plan)
        return Weight(self.lowered(problem, plan).peak_device_bytes, reserved.nbytes)

    def evaluate(self, problem: Problem, plan: Plan) -> PlanEvaluation:
        """The chunk-level evaluation with the allocator's bytes; can be the `evaluator` of
        problems."""
        lowered, key = self.lowered(problem, plan), encode(problem.cluster)
        if key not in lowered.evaluations:
            held = self.reserved(problem, plan)
            lowered.evaluations[key] = timed(problem, lowered, held)
        return lowered.evaluations[key]

    def parts_s(self, problem: Problem, plan: Plan, step_s: float) -> dict[str, float]:
        """Seconds of the parts of a step that takes `step_s`."""
        lowered, key = self.lowered(problem, plan), (encode(problem.cluster), step_s)
        if key not in lowered.parts_s:
            lowered.parts_s[key] = parts_of(problem, lowered.program, step_s)
        return lowered.parts_s[key]


RECENTLY = Evaluator(kept=RECENT, replay_all=True)
"""The evaluator of problems that share nothing."""


def evaluate(problem: Problem, plan: Plan) -> PlanEvaluation:
    """The evaluator of single problems."""
    return RECENTLY.evaluate(problem, plan)


def weigh(problem: Problem, plan: Plan) -> Weight:
    """The weigher of single problems."""
    return RECENTLY.weigh(problem, plan)


def timed(problem: Problem, lowered: Lowered, held: Reserved) -> PlanEvaluation:
    """The evaluation of a lowered plan whose allocator reserves `held`."""
    evaluation = evaluate_program(problem, lowered.plan, lowered.program, ranks=lowered.ranks)
    return replace(evaluation, reserved_bytes=held.nbytes, pressed=held.pressed)
