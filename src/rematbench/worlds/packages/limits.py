"""The reasons why a baseline does not run a job, used by the baseline's plan, guards and flags."""

from collections.abc import Iterable
from typing import NamedTuple

from rematbench.inputs.layout import Layout
from rematbench.problem import AttentionKind, Problem
from rematbench.workload import Model, Workload
from rematbench.worlds.records.record import RunSpec

Reason = tuple[bool, str]
"""(whether the reason holds, the feature that the baseline then does not run)."""


QUANTISED = "quantised linears"
NOT_RUN = "not run here)"
"""The end of a reason that names a feature for which the package has options but which this
baseline does not run."""


class Setup(NamedTuple):
    """The facts on which reasons depend, for a problem to plan or a run to start."""

    work: Workload
    layout: Layout
    attention: AttentionKind
    optimizer_kind: str | None = None

    @property
    def special_features(self) -> tuple[str, ...]:
        """The features, in words, that a baseline runs only if it names them: those of the model,
        weights that do not train, quantised linears, and an optimizer other than Adam."""
        kind = self.optimizer_kind
        others = {
            "weights that do not train": not self.work.trains_all,
            QUANTISED: self.work.recipe != "none",
            f"the optimizer {kind}": kind is not None,
        }
        return (*self.model.special_features, *(words for words, holds in others.items() if holds))

    @property
    def model(self) -> Model:
        return self.work.model


def setup_of(request: Problem | RunSpec) -> Setup:
    if isinstance(request, Problem):
        kind = request.stack_choice.optimizer_kind
        return Setup(request.workload, request.layout, request.attention, kind)
    scores: AttentionKind = "unfused" if request.stack.attention == "unfused" else "flash"
    return Setup(request, request.layout, scores, request.stack.optimizer_kind)


def active_reasons(reasons: Iterable[Reason]) -> tuple[str, ...]:
    return tuple(reason for holds, reason in reasons if holds)


def without_options(reasons: Iterable[str]) -> tuple[str, ...]:
    """The reasons for which the package has no options: those that do not end with NOT_RUN."""
    return tuple(reason for reason in reasons if not reason.endswith(NOT_RUN))
