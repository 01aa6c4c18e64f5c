"""Plans of candidates: choose the setting that fits, then lower and evaluate the plan."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rematbench.advise.compare.compositions import Candidate
from rematbench.evaluate.evaluator import SINGLE_EVALUATOR
from rematbench.evaluate.result import PlannedJob, Result, needs_seconds, of_plan, told_fragmented
from rematbench.evaluate.verdict import retries
from rematbench.host.workers import collect_rarely
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import LayoutError
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.discover import discover
from rematbench.plugins.policies import applicable_settings
from rematbench.plugins.registry import MethodError, make_plan, method_text
from rematbench.solve.search import smallest_feasible

Pair = tuple[Candidate, Result]
"""What was to be planned, and what came out."""

Task = Candidate | Pair
"""A candidate to evaluate, or one with a result whose step is to be broken into parts. The
simulations of the parts cost more than all other work, and most results stand in no row."""

UNPLANNED_BYTES = 2**62
"""Missing bytes of a candidate without a plan: more than any device has."""

FRAGMENTS = 0.1
"""Share of device memory by which allocator fragmentation may differ between two plans."""


class Tuning:
    """Evaluates candidates of one job; each worker process has one."""

    def __init__(self, job: PlannedJob, methods: tuple[Path, ...]) -> None:
        collect_rarely()
        self.job, self.problem, self.registry = job, job.problem, discover(methods)

    def __call__(self, task: Task) -> Result:
        """Return the result of a candidate (`failed` if its method raises). For a result, return it
        with the parts of its step and its allocator retries."""
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

    def _evaluated(self, candidate: Candidate) -> Result:
        candidate = self._fitted(candidate)
        settings = applicable_settings(candidate.settings, self.problem)
        name, key = candidate.name, candidate.smallest
        if key:
            settings = {**settings, key: self._smallest(candidate, settings)}
            name = f"{name} {settings[key]}"
        unplanned = replace(blank(self.job, candidate), method=name)
        plan = self._plan(candidate, settings)
        if isinstance(plan, Unsupported):
            return replace(unplanned, status="unsupported", reason=plan.reason)
        return told_fragmented(of_plan(unplanned, plan))

    def _with_parts(self, result: Result) -> Result:
        plan, evaluation = result.plan, result.evaluation
        assert plan is not None
        assert evaluation is not None
        timed = not evaluation.not_timed
        return replace(
            result,
            parts_s=SINGLE_EVALUATOR.parts_s(self.problem, plan, evaluation.step_s)
            if timed
            else {},
            retries=retries(self.problem, plan, evaluation),
        )

    def _fitted(self, candidate: Candidate) -> Candidate:
        """The candidate with the first of its settings that fits, or the last where none fits."""
        choices = candidate.first_that_fits
        if not choices:
            return candidate
        margins = [partial(self._margin, candidate, choice) for choice in choices]
        chosen = choices[self._first_that_fits(margins)]
        before = candidate.name.removesuffix(candidate.method)
        name = before + method_text(self.registry.methods[candidate.method], chosen)
        return replace(candidate, name=name, settings=dict(chosen), first_that_fits=())

    def _first_that_fits(self, margins: Sequence[Callable[[], int]]) -> int:
        """The first index whose margin is not negative, else the index of the largest margin.
        Margins grow with the index, except for allocator fragmentation. So if the last margin is
        short by no more than fragmentation can explain, every index is tried."""
        last = len(margins) - 1
        margin = margins[last]()
        if margin >= 0:
            first = smallest_feasible(lambda index: margins[index](), last)
            return last if first is None else first
        if -margin > FRAGMENTS * self.problem.usable_bytes:
            return last
        every = [one() for one in margins]
        fitting = [index for index, value in enumerate(every) if value >= 0]
        return fitting[0] if fitting else max(range(last + 1), key=every.__getitem__)

    def _margin(self, candidate: Candidate, settings: Mapping[str, Any]) -> int:
        """Free device bytes of the candidate under these settings (negative: bytes missing)."""
        plan = self._plan(candidate, settings)
        if isinstance(plan, Unsupported):
            return -UNPLANNED_BYTES
        return self.problem.cost.headroom_bytes(plan)

    def _plan(self, candidate: Candidate, settings: Mapping[str, Any]) -> Plan | Unsupported:
        method = self.registry.resolve(candidate.method, settings, self.problem)
        base = candidate.base or self.job.base
        if len(method.methods) > 1:
            return method.plan(self.problem, base)
        return make_plan(method.methods[0], self.problem, base)

    def _smallest(self, candidate: Candidate, settings: Mapping[str, Any]) -> int:
        """The smallest value, from 1 to the layers of a chunk, with which the candidate fits. Where
        no value fits: the best of the powers of two (groups of layers are worst at both ends)."""
        top = max(len(chunk) for rank in self.job.base.partition for chunk in rank)

        def margin(value: int) -> int:
            return self._margin(candidate, {**settings, candidate.smallest: value})

        steps = smallest_feasible(lambda steps: margin(steps + 1), top - 1) if top > 1 else 0
        if steps is not None:
            return steps + 1
        values = [1 << power for power in range(top.bit_length())]
        margins = {value: margin(value) for value in values}
        return next((v for v in values if margins[v] >= 0), max(values, key=margins.__getitem__))


def blank(job: PlannedJob, candidate: Candidate) -> Result:
    """The result of a candidate before it has a plan."""
    return Result(
        job=job,
        method=candidate.name,
        family=candidate.family,
        origin=candidate.origin,
        status="failed",
    )
