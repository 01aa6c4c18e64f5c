"""Makes candidates of one problem: plans, lowers, evaluates and judges; breaks steps into parts."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rematbench.advise.compare.candidates import Candidate, clash
from rematbench.advise.compare.entry import UNPLANNED, Entry
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.breakdown import parts_of
from rematbench.evaluate.result import evaluate_plan
from rematbench.evaluate.verdict import retries
from rematbench.host.workers import collect_rarely
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.discover import discover
from rematbench.plugins.policies import present
from rematbench.plugins.registry import MethodError, planned, typed
from rematbench.problem import Problem
from rematbench.solve.search import smallest_feasible
from rematbench.spec.layout import LayoutError

Task = Candidate | Entry
"""A candidate to make, or an entry whose step is to be broken into parts. The simulations of the
parts cost more than all other work, and most entries stand in no row of a table."""

FRAGMENTS = 0.1
"""Share of device memory by which allocator fragmentation may differ between two plans."""


class Bench:
    """Makes candidates of one problem; each worker process holds one Bench."""

    def __init__(self, problem: Problem, base: Plan, methods: tuple[Path, ...]) -> None:
        collect_rarely()
        self.problem, self.base, self.registry = problem, base, discover(methods)

    def __call__(self, task: Task) -> Entry:
        """The entry of a candidate (`failed` where its method raises), or an entry with its
        parts."""
        if isinstance(task, Entry):
            return self._with_parts(task)
        candidate = task
        try:
            return self._entry(candidate)
        except (PlanError, LayoutError, MethodError) as error:
            return Entry(candidate=candidate, status="failed", reason=str(error))
        except Exception as error:  # an error of one method must not end the comparison
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return Entry(candidate=candidate, status="failed", reason=reason)

    def _entry(self, candidate: Candidate) -> Entry:
        candidate = self._fitted(candidate)
        settings = present(candidate.settings, self.problem)
        if candidate.smallest:
            settings = {**settings, candidate.smallest: self._smallest(candidate, settings)}
        plan = self._plan(candidate, settings)
        if isinstance(plan, Unsupported):
            return Entry(
                candidate=candidate, status="unsupported", reason=plan.reason, settings=settings
            )
        outcome = evaluate_plan(self.problem, plan)
        assert outcome.evaluation is not None
        if outcome.status == "unsupported":
            return Entry(
                candidate=candidate, status="unsupported", reason=outcome.reason, settings=settings
            )
        return Entry(
            candidate=candidate,
            status="ok" if outcome.status == "ok" else "oom",
            reason=outcome.reason,
            settings=settings,
            plan=plan,
            evaluation=outcome.evaluation,
            verdict=outcome.verdict,
            clash=clash(self.problem, candidate.base, plan) if candidate.base else "",
        )

    def _with_parts(self, entry: Entry) -> Entry:
        assert entry.plan is not None
        assert entry.evaluation is not None
        program = lower(entry.plan, self.problem)
        return replace(
            entry,
            parts_s=parts_of(self.problem, program, entry.step_s),
            retries=retries(self.problem, entry.plan, entry.evaluation),
        )

    def _fitted(self, candidate: Candidate) -> Candidate:
        """The candidate with the first of its settings that fits, or the last where none fits."""
        choices = candidate.first_that_fits
        if not choices:
            return candidate

        margins = [partial(self._margin, candidate, choice) for choice in choices]
        chosen = choices[self._first_that_fits(margins)]
        before = candidate.name.removesuffix(candidate.method)
        name = before + typed(self.registry.methods[candidate.method], chosen)
        return replace(candidate, name=name, settings=dict(chosen), first_that_fits=())

    def _first_that_fits(self, margins: Sequence[Callable[[], int]]) -> int:
        """The first index whose margin is not negative, else the index of the largest margin.
        Margins grow with the index, except for allocator fragmentation. So if the last margin is
        short by no more than fragmentation can explain, every index is tried."""
        last = len(margins) - 1
        least = margins[last]()
        if least >= 0:
            found = smallest_feasible(lambda index: margins[index](), last)
            return last if found is None else found
        if -least > FRAGMENTS * self.problem.usable_bytes:
            return last
        known = [margin() for margin in margins]
        fitting = [index for index, value in enumerate(known) if value >= 0]
        return fitting[0] if fitting else max(range(last + 1), key=known.__getitem__)

    def _margin(self, candidate: Candidate, settings: Mapping[str, Any]) -> int:
        """Free device bytes of the candidate under these settings (negative: bytes missing)."""
        plan = self._plan(candidate, settings)
        if isinstance(plan, Unsupported):
            return -UNPLANNED
        return self.problem.cost.headroom_bytes(plan)

    def _plan(self, candidate: Candidate, settings: Mapping[str, Any]) -> Plan | Unsupported:
        found = self.registry.resolve(candidate.method, settings, self.problem)
        base = candidate.base or self.base
        if len(found.methods) > 1:
            return found.plan(self.problem, base)
        return planned(found.methods[0], self.problem, base)

    def _smallest(self, candidate: Candidate, settings: Mapping[str, Any]) -> int:
        """The least value, from 1 to the layers of a chunk, with which the candidate fits. Where no
        value fits: the best of the powers of two (groups of layers are worst at both ends)."""
        top = max(len(chunk) for rank in self.base.partition for chunk in rank)

        def margin(value: int) -> int:
            return self._margin(candidate, {**settings, candidate.smallest: value})

        found = smallest_feasible(lambda steps: margin(steps + 1), top - 1) if top > 1 else 0
        if found is not None:
            return found + 1
        values = [1 << power for power in range(top.bit_length())]
        margins = {value: margin(value) for value in values}
        return next((v for v in values if margins[v] >= 0), max(values, key=margins.__getitem__))
