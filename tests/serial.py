"""`compare` without its planners and in one process, with a list of what it made."""

from collections.abc import Iterable, Iterator

from rematbench.advise.compare.bench import Bench, Task
from rematbench.advise.compare.candidates import load_compare
from rematbench.advise.compare.compare import Comparing
from rematbench.advise.compare.entry import Compared, Entry
from rematbench.problem import Problem


class Serial:
    """A pool of no processes."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.waiting, self.done = bench, list[Task](), list[Task]()

    def add(self, tasks: Iterable[Task]) -> None:
        self.waiting += tasks

    def run(self) -> Iterator[tuple[Task, Entry]]:
        while self.waiting:
            task = self.waiting.pop(0)
            self.done.append(task)
            yield task, self.bench(task)


def compared(problem: Problem) -> tuple[Compared, list[Task]]:
    """The comparison, and its tasks in their order."""
    comparing = Comparing(problem, problem.base_plan, load_compare())
    pool = Serial(Bench(problem, problem.base_plan, ()))
    comparing.pool = pool  # type: ignore[assignment]
    return comparing.quick(), pool.done
