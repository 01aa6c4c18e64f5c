"""optimizer_offload: move the fewest optimizer states to the host, and copy some back for their
update.

Claim: the states that leave the device are the smallest share with which the plan fits. The device
updates f* = t_cpu / (t_cpu + t_copy) of them, each for a visit on the device, while the CPU updates
the others, so both end together; the update and its order remain exact.
Source: our formulation. The mechanism is that of Deep Optimizer States (Maurya et al. 2024), whose
fraction is 1/K; t_cpu and t_copy are the seconds of one parameter's update on the CPU and of its
visit, and a visit's delay of the CPU is subtracted from t_copy.
Deviations: updates that are undone after the norm is known (SuperOffload) and stale gradients
(ZenFlow) are refused, because they are not lossless or need a second program.
"""

from functools import partial
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from rematbench.method import (
    Fraction,
    Pieces,
    Place,
    Plan,
    PositiveInt,
    Problem,
    Settings,
    Unsupported,
)
from rematbench.solve.state_pieces import even, piece_size, placed, refusal, smallest_share

REFUSED = {
    "rollback": "updates that a rollback undoes after the norm (SuperOffload) are not modelled",
    "stale": "stale gradients (ZenFlow) are not lossless",
}


class OptimizerOffload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`share`: the share of states that leave the device (None: the smallest that fits).
    `visiting`: of these, the share that the device updates (None: f*; 1 on a cluster whose host's
    speed is unknown). `size`: parameters of a piece. `slots`: the number of visits at the same time
    (0: each piece follows the piece before it). `start`: after the norm of all gradients, or in the
    last backward as gradients become ready, which needs `clip` (whether the norm scales gradients)
    to be false. `order`: exact; the other orders are refused with their reasons."""

    name: ClassVar[str] = "optimizer_offload"
    moves_states: ClassVar[bool] = True
    grid: ClassVar[tuple[Settings, ...]] = tuple({"share": k / 4} for k in range(1, 5))
    share: Fraction | None = None
    visiting: Fraction | None = None
    size: PositiveInt = 100_000_000
    slots: Annotated[int, Meta(ge=0, le=16)] = 2
    start: Literal["norm", "ready"] = "norm"
    clip: bool = True
    order: Literal["exact", "rollback", "stale"] = "exact"

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        visiting = self.visiting
        if visiting is None:
            visiting = problem.cost.visiting_share(two_way=self.slots > 1)
        pieces = self.cut(("visit",), self.size)
        reason = REFUSED.get(self.order, "")
        if reason := reason or refusal(problem, base, pieces):
            return Unsupported(reason)
        share, bound = self.share, "given"
        if share is None:
            at = partial(self.at, problem, base, visiting=visiting)
            share, bound = smallest_share(problem, base, self.size, at)
        made = self.at(problem, base, share, visiting)
        return made.noting(share=share, visiting=visiting, bound=bound)

    def at(self, problem: Problem, base: Plan, share: float, visiting: float) -> Plan:
        size, count = piece_size(problem, base, self.size)
        away = round(count * share)
        turns = iter(even(away, visiting, "visit", "host") if away else ())
        places: list[Place] = [
            next(turns) if place == "host" else place
            for place in even(count, share, "host", "device")
        ]
        return placed(problem, base, self.cut(tuple(places), size), gradients=False)

    def cut(self, places: tuple[Place, ...], size: int) -> Pieces:
        """The pieces at `places`, with this method's start and slots."""
        early = {"start": self.start, "clip": self.clip}
        return Pieces(size=size, places=places, slots=self.slots, **early)  # type: ignore[arg-type]
