"""Tunes a candidate to the first setting that fits, then lowers and evaluates its plan."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from rematbench.advise.compare.compositions import UNPLANNED_BYTES, Contender, Pair
from rematbench.evaluate.evaluation import rated
from rematbench.evaluate.evaluator import SINGLE_EVALUATOR
from rematbench.evaluate.result import (
    PlannedJob,
    Result,
    at_middle_rate,
    needs_seconds,
    of_plan,
    told_fragmented,
)
from rematbench.evaluate.verdict import retries
from rematbench.host.workers import collect_rarely
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import LayoutError
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import MethodError, make_plan
from rematbench.solve.search import smallest_feasible

Task = Contender | Pair
"""A candidate to evaluate, or a candidate with a result whose step is to be broken into parts.
Breaking a step into parts is a separate task, because its simulations cost more than all other work
and most results have no row."""
FRAGMENTS = 0.1
"""The share of device memory by which fragmentation may differ between two plans."""


class Tuning:
    """Evaluates candidates of one job, in a worker process."""

    def __init__(self, job: PlannedJob, methods: tuple[Path, ...]) -> None:
        collect_rarely()
        self.job, self.problem, self.registry = job, job.problem, discover(methods)

    def __call__(self, task: Task) -> Result:
        """The result of a candidate (`failed` if its method raises); for a task with a result, that
        result with the parts of its step and its allocator retries."""
        if isinstance(task, tuple):
            return self._with_parts(task[1])
        try:
            return self._evaluated(task)
        except (PlanError, LayoutError, MethodError) as error:
            return replace(blank(self.job, task), reason=str(error))
        except RateError as error:
            reason = needs_seconds(task.name, error)
            return replace(blank(self.job, task), status="unsupported", reason=reason)
        except Exception as error:  # an error of one method must not end the comparison
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return replace(blank(self.job, task), reason=reason)

    def _evaluated(self, candidate: Contender) -> Result:
        scalar = candidate.parts[-1].scalar
        if scalar is not None:
            choose = self._first_that_fits if scalar.scale == "pieces" else self._smallest
            candidate = candidate.tuned(choose(candidate))
        unplanned, plan = blank(self.job, candidate), self._plan(candidate)
        if isinstance(plan, Unsupported):
            return replace(unplanned, status="unsupported", reason=plan.reason)
        return at_middle_rate(told_fragmented(of_plan(unplanned, plan)))

    def _with_parts(self, result: Result) -> Result:
        plan, evaluation = result.plan, result.evaluation
        assert plan is not None
        assert evaluation is not None
        timed = not evaluation.not_timed
        return replace(
            result,
            parts_s=SINGLE_EVALUATOR.parts_s(rated(self.problem, plan), plan, evaluation.step_s)
            if timed
            else {},
            retries=retries(self.problem, plan, evaluation),
        )

    def _first_that_fits(self, candidate: Contender) -> int:
        """The first step that fits, otherwise the step with the largest margin.  Margins grow with
        the step, apart from fragmentation.  So if the last step lacks no more than fragmentation
        can explain, every step is tried."""
        last = candidate.most_pieces
        margin = self._margin(candidate.tuned(last))
        if margin >= 0:
            first = smallest_feasible(lambda i: self._margin(candidate.tuned(i + 1)), last - 1)
            return last if first is None else first + 1
        if -margin > FRAGMENTS * self.problem.usable_bytes:
            return last
        return self._best(candidate, range(1, last + 1))

    def _smallest(self, candidate: Contender) -> int:
        """The smallest number of layers, at most those of a chunk, with which the candidate fits.
        If none fits, the best of the powers of two (groups of layers are worst at both ends)."""
        top = max(len(chunk) for rank in self.job.base.partition for chunk in rank)
        if top == 1:
            return 1
        index = smallest_feasible(lambda i: self._margin(candidate.tuned(i + 1)), top - 1)
        if index is not None:
            return index + 1
        return self._best(candidate, [1 << power for power in range(top.bit_length())])

    def _best(self, candidate: Contender, steps: Sequence[int]) -> int:
        """The first step that fits, otherwise the one with the largest margin."""
        margins = {step: self._margin(candidate.tuned(step)) for step in steps}
        fitting = (step for step, margin in margins.items() if margin >= 0)
        return next(fitting, max(steps, key=margins.__getitem__))

    def _margin(self, candidate: Contender) -> int:
        """Free device bytes under the candidate's plan (negative: bytes missing)."""
        plan = self._plan(candidate)
        if isinstance(plan, Unsupported):
            return -UNPLANNED_BYTES
        return self.problem.cost.headroom_bytes(plan)

    def _plan(self, candidate: Contender) -> Plan | Unsupported:
        method = self.registry.resolve(candidate.parts[-1].text, None, self.problem)
        base = candidate.base or self.job.base
        if len(method.methods) > 1:
            return method.plan(self.problem, base)
        return make_plan(method.methods[0], self.problem, base)  # its reason omits the name


def blank(job: PlannedJob, candidate: Contender) -> Result:
    """The result of a candidate before it has a plan."""
    return Result(
        job=job,
        method=candidate.name,
        family=candidate.family,
        origin=candidate.origin,
        status="failed",
    )
