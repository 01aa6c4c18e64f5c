"""What all searches of one job know of a layout."""

from functools import cached_property

from rematbench.advise.search.skeleton import Frame, frame
from rematbench.advise.search.space import Choice
from rematbench.advise.search.trial import Trials
from rematbench.evaluate.evaluator import Evaluator
from rematbench.problem import Problem


class Site:
    """A layout of a job with its problem.  `tight_s`: seconds of bounds by the schedule, by the
    text of the arm; `trials`: what is known of plans."""

    def __init__(self, choice: Choice, problem: Problem, programs: Evaluator | None = None) -> None:
        self.choice, self.problem = choice, problem
        self.tight_s: dict[str, float] = {}
        self.trials = Trials(programs)

    @cached_property
    def frame(self) -> Frame:
        """The part of the step that no plan changes."""
        return frame(self.problem, self.choice.base(self.problem.base_plan))
