"""What the searches of one model and length share: lowered programs, which no cluster changes."""

from collections import defaultdict

from msgspec.json import encode

from rematbench.choose.outcome import Lowered
from rematbench.problem import Problem
from rematbench.search.probe import Known


class Shared:
    """`probes`: the lowered programs of probes."""

    def __init__(self) -> None:
        self.probes: Known = {}
        self._plans: dict[bytes, dict[bytes, Lowered]] = defaultdict(dict)

    def plans(self, problem: Problem) -> dict[bytes, Lowered]:
        """The lowered plans of a problem on any cluster, by `same_plan`."""
        return self._plans[encode((problem.workload, problem.system, problem.layout))]
