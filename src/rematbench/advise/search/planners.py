"""Planners at the end of a search: methods whose plan is unknown before it is solved.

Bounds cover no such plan, so planners enter once the others are proved: each is solved at the
layouts of the fastest plans, in that order, until a plan of it fits.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from rematbench.advise.compare.candidates import lost_reason
from rematbench.advise.search.job import Asked, SearchJob
from rematbench.advise.search.space import Choice
from rematbench.advise.search.trial import Tried, tried_plan
from rematbench.host.workers import NoAnswer, Pool
from rematbench.worlds.packages.flags import Engines

MOST_LAYOUTS = 3
"""Layouts at which a planner is solved: solving takes seconds at each."""


class Planned(Struct, frozen=True, kw_only=True):
    """The end of one planner: its plan that fits at one of the layouts, or the reason why there is
    none."""

    method: str
    tried: Tried | None = None
    reason: str = ""


Task = tuple[str, Choice]
"""A planner, and the layout to solve it at."""


class Solver:
    """Solves planners in a worker process."""

    def __init__(self, asked: Asked) -> None:
        self.job = SearchJob(asked)

    def __call__(self, task: Task) -> Tried:
        """The trial of a planner's plan."""
        method, choice = task
        problem, only = self.job.problem(choice), self.job.asked.engine
        engines = Engines(problem, only) if only else None
        return tried_plan(choice, problem, method, 0.0, self.job.registry, engines)


def solved(
    made: SearchJob, found: Sequence[Tried], *, limit_s: int, processes: int
) -> Iterator[Planned]:
    """Yield the end of each planner: of those that end at one layout, together.  `found`: the plans
    of the search, the fastest first; `limit_s`: CPU seconds for a planner at one layout."""
    choices = list(dict.fromkeys(one.choice for one in found))[:MOST_LAYOUTS]
    waiting = list(made.planners) if choices else []
    pool: Pool[Task, Tried] = Pool(processes, Solver, (made.asked,), limit_s)
    try:
        for choice in choices:
            pool.add([(method, choice) for method in waiting])
            answers = {method: answer for (method, _), answer in pool.run()}
            for method in list(waiting):  # in one order, whichever ends first
                end = _end(method, answers[method], limit_s)
                if end.tried or isinstance(answers[method], str) or choice == choices[-1]:
                    waiting.remove(method)
                    yield end
    finally:
        pool.close()


def _end(method: str, answer: Tried | NoAnswer, limit_s: int) -> Planned:
    if isinstance(answer, str):
        return Planned(method=method, reason=lost_reason(answer, limit_s))
    if answer.evaluation is None:
        return Planned(method=method, reason=answer.reason.replace(f"{method}: ", "", 1))
    return Planned(method=method, tried=answer)
