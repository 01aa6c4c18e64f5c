"""The evaluator: lowers each plan once, and computes each of its numbers once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

from msgspec.json import encode
from msgspec.structs import replace

from rematbench.evaluate.breakdown import parts_of
from rematbench.evaluate.evaluation import PlanEvaluation, evaluate_program
from rematbench.evaluate.lowered import Lowered, Reserved, same_plan, weighed
from rematbench.plan import Plan
from rematbench.problem import Problem, Weight

KEPT_PROGRAMS = 8
"""Programs that the evaluator of single problems keeps.  A method weighs several plans before it
needs the seconds of one of them, and writes its reasons into `fit`."""

Same = Callable[[Problem], Hashable]
"""A key that is equal for problems that share lowered plans."""


def without_cluster(problem: Problem) -> Hashable:
    """A key that is equal for problems that differ only in their cluster: no cluster changes a
    program."""
    return encode((problem.workload, problem.system, problem.layout, problem.attention))


class Evaluator:
    """Lowered plans and their numbers.  Problems with equal keys `same` share a lowered plan
    (default: no two problems do); the last `kept` lowered plans stay (None: all)."""

    def __init__(self, same: Same = id, kept: int | None = None) -> None:
        self._same, self._kept = same, kept
        self._lowered: OrderedDict[tuple[Hashable, bytes], Lowered] = OrderedDict()

    def lowered(self, problem: Problem, plan: Plan) -> Lowered:
        """The plan's program and bytes.  It refers to its problem, so the `id` stays
        unique."""
        key = self._same(problem), same_plan(plan)
        if key not in self._lowered:
            self._lowered[key] = Lowered(problem, plan)
            if self._kept is not None and len(self._lowered) > self._kept:
                self._lowered.popitem(last=False)
        return self._lowered[key]

    def reserved(self, problem: Problem, plan: Plan) -> Reserved:
        """Bytes that the allocator of the plan's fullest rank reserves on the cluster's devices.
        Live bytes above the usable bytes are not replayed: no allocator needs fewer."""
        return weighed(problem, self.lowered(problem, plan), problem.usable_bytes)

    def weigh(self, problem: Problem, plan: Plan) -> Weight:
        """The bytes of a plan; can be the `weigher` of problems."""
        lowered = self.lowered(problem, plan)
        return Weight(lowered.peak_device_bytes, weighed(problem, lowered).nbytes)

    def weigh_within(self, problem: Problem, plan: Plan) -> Weight:
        """As `weigh`, but a plan with more live bytes than the device has is not replayed."""
        reserved = self.reserved(problem, plan)
        return Weight(self.lowered(problem, plan).peak_device_bytes, reserved.nbytes)

    def evaluate(self, problem: Problem, plan: Plan) -> PlanEvaluation:
        """The chunk-level evaluation with the allocator's bytes; can be the `evaluator` of
        problems."""
        lowered = self.lowered(problem, plan)
        return timed(problem, lowered, weighed(problem, lowered))

    def parts_s(self, problem: Problem, plan: Plan, step_s: float) -> dict[str, float]:
        """Seconds of the parts of a step that takes `step_s`."""
        return parts_of(problem, self.lowered(problem, plan).program, step_s)


SINGLE_EVALUATOR = Evaluator(kept=KEPT_PROGRAMS)
"""The evaluator of problems that share no lowered plan."""


def evaluate(problem: Problem, plan: Plan) -> PlanEvaluation:
    """The evaluator of single problems."""
    return SINGLE_EVALUATOR.evaluate(problem, plan)


def weigh(problem: Problem, plan: Plan) -> Weight:
    """The weigher of single problems."""
    return SINGLE_EVALUATOR.weigh(problem, plan)


def timed(problem: Problem, lowered: Lowered, held: Reserved) -> PlanEvaluation:
    """The evaluation of a lowered plan whose allocator reserves `held`."""
    evaluation = evaluate_program(problem, lowered.plan, lowered.program, ranks=lowered.ranks)
    return replace(evaluation, reserved_bytes=held.nbytes, pressed=held.pressed)
