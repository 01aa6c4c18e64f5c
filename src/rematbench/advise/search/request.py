"""The input of a search, and its progress after a round."""

from collections.abc import Callable, Generator
from math import inf
from pathlib import Path

from msgspec import Struct

from rematbench.advise.candidates.layouts import Fixed
from rematbench.evaluate.result import Result
from rematbench.inputs.job import Job

MINUTE = 20
"""The most rounds of a search that is one of many in a row: one or two minutes of a core."""


class SearchRequest(Struct, frozen=True, kw_only=True):
    """The input of a search: a job in which all degrees but the `fixed` ones are open.

    `only`: methods to compose, at least one per plan (empty: all methods, and plans without any),
    and planners to try at the end.  If it contains methods that place optimizer states, layouts are
    also tried with these placements, under the other methods or, without others, under all.
    `folders`: folders with further method files.  `engine`: keep only plans that this package (or
    `ours`, our executor) has options for.  `reserve_gib`: device memory that plans leave free
    (None: the usual reserve).  `within`: the gap to prove, as a share of the best step.
    `faster_than_s`: count the layouts that have a plan with a shorter step, keep the first such
    plan of each, and prove no best plan.  `any_fit`: look for any plan that fits, and bound no
    step.  `most_methods`: the most methods per plan (None: as in config/compare.yaml).  `hosts`:
    whether plans may use host memory beyond what the job says.  `by_layer`: tune plans layer by
    layer, also at stated stages that no bound covers."""

    spec: Job
    fixed: Fixed = Fixed()
    only: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    engine: str = ""
    reserve_gib: float | None = None
    within: float = 0.005
    faster_than_s: float = inf
    any_fit: bool = False
    most_methods: int | None = None
    hosts: bool = True
    by_layer: bool = False


class Progress(Struct, frozen=True, kw_only=True):
    """The state of a search after a round.  `results`: the plans that fit, fastest first;
    `bound_s`: lower bound of the step of all plans left; `listed_s`: the same, including plans that
    cannot be the fastest; `excluded`: numbers of excluded plans by reason; `short_bytes`: the
    fewest device bytes that an excluded plan lacked; `plans`: number of joint plans of the
    space."""

    results: tuple[Result, ...] = ()
    bound_s: float = 0.0
    listed_s: float = 0.0
    simulations: int = 0
    excluded: dict[str, int] = {}
    short_bytes: float = inf
    plans: int = 0

    @property
    def best_s(self) -> float:
        """Seconds of the fastest step that fits."""
        return self.results[0].fitting_s if self.results else inf

    @property
    def gap(self) -> float:
        """The largest share of the best step that an unknown better plan may save."""
        return max(0.0, 1.0 - self.bound_s / self.best_s) if self.best_s < inf else inf

    def lists(self, shown: int, within: float) -> bool:
        """Whether the first `shown` plans are final: no other plan is faster than the last of them
        by more than the gap."""
        if len(self.results) < shown:
            return self.listed_s == inf
        return shown == 1 or self.listed_s >= (1.0 - within) * self.results[shown - 1].fitting_s


Rounds = Callable[..., Generator[Progress, None, None]]
"""Runs the search of a request and yields its progress after each round.  In commands this is
`rounds.rounds` with a number of processes."""
