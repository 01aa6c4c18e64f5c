"""`compare` without its planners and in one process, with a list of what it evaluated."""

from collections.abc import Iterable, Iterator

from rematbench.advise.candidates.candidate import CompareConfig, load_compare
from rematbench.advise.compare.comparison import Comparison
from rematbench.advise.compare.tuning import Task, Tuning
from rematbench.evaluate.result import PlannedJob, Result
from rematbench.problem import Problem


class Serial:
    """A pool of no processes."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning, self.waiting, self.done = tuning, list[Task](), list[Task]()

    def add(self, tasks: Iterable[Task]) -> None:
        self.waiting += tasks

    def run(self) -> Iterator[tuple[Task, Result]]:
        while self.waiting:
            task = self.waiting.pop(0)
            self.done.append(task)
            yield task, self.tuning(task)


def compared(
    problem: Problem, config: CompareConfig | None = None
) -> tuple[Comparison, list[Task]]:
    """The comparison, and its tasks in their order."""
    job = PlannedJob(problem=problem, base=problem.base_plan)
    comparison = Comparison(job, config or load_compare())
    pool = Serial(Tuning(job, ()))
    comparison.pool = pool  # type: ignore[assignment]
    comparison.quick()
    return comparison, pool.done
