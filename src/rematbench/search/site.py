"""What all searches of one job know of a layout."""

from functools import cached_property

from rematbench.problem import Problem
from rematbench.search.skeleton import Frame, frame
from rematbench.search.space import Choice
from rematbench.search.trial import Tried


class Site:
    """A layout of a job with its problem.  `tight_s`: seconds of bounds by the schedule, by the
    text of the arm; `trials`: simulated plans, by content."""

    def __init__(self, choice: Choice, problem: Problem) -> None:
        self.choice, self.problem = choice, problem
        self.tight_s: dict[str, float] = {}
        self.trials: dict[bytes, Tried] = {}

    @cached_property
    def frame(self) -> Frame:
        """The part of the step that no plan changes."""
        return frame(self.problem, self.choice.base(self.problem.base_plan))
