"""Lowered plans that the clusters of one model and length share: no cluster changes a program."""

from msgspec.json import encode

from rematbench.evaluate.reserved import Lowered, Reserved, same_plan, weighed
from rematbench.plan import Plan
from rematbench.problem import Problem, Weight


class Programs:
    """Lowered plans by their problem, without its cluster, and their content."""

    def __init__(self) -> None:
        self._lowered: dict[tuple[bytes, bytes], Lowered] = {}

    def lowered(self, problem: Problem, plan: Plan) -> Lowered:
        """A plan's program and bytes; all clusters share one object."""
        key = (
            encode((problem.workload, problem.system, problem.layout, problem.attention)),
            same_plan(plan),
        )
        if key not in self._lowered:
            self._lowered[key] = Lowered(problem, plan)
        return self._lowered[key]

    def held(self, problem: Problem, plan: Plan) -> Reserved:
        """What the plan's allocator reserves on the cluster's devices."""
        return weighed(problem, self.lowered(problem, plan), problem.usable_bytes)

    def weigh(self, problem: Problem, plan: Plan) -> Weight:
        """The bytes of a plan; this method is the `weigher` of problems."""
        lowered = self.lowered(problem, plan)
        held = weighed(problem, lowered, problem.usable_bytes)
        return Weight(lowered.peak_device_bytes, held.nbytes)
