"""deep_optimizer_states: optimizer states on the host, and every K-th piece updated on the device.

Claim: while the CPU updates K - 1 pieces, one more piece is copied to the device and updated there,
so the update is shorter than on the CPU alone.
Source: Maurya et al., Deep Optimizer States, Middleware 2024, arXiv 2410.21316; code of DeepSpeed's
branch deep-optimizer-states, logs of deep-optimizer-states-results. In a step 2 n (1 - 1/K) + 12
n/K bytes are copied each way, for n parameters of a rank.
Deviations: the paper's formula for K is not public; K = 2 is the best of its logs. The published
runs do not train (their loss differs from the baseline's from step 2 on); here the update is exact.
"""

from typing import Annotated, ClassVar

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
from rematbench.solve.state_pieces import even, piece_size, placed, refusal


class DeepOptimizerStates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`interleave`: K. `ratio`: the share of pieces that are kept on the host. `size`: parameters
    of a piece. `slots`: the number of visits at the same time."""

    name: ClassVar[str] = "deep_optimizer_states"
    moves_states: ClassVar[bool] = True
    grid: ClassVar[tuple[Settings, ...]] = tuple({"interleave": k} for k in range(2, 6))
    interleave: Annotated[int, Meta(ge=2, le=1000)] = 2
    ratio: Fraction = 1.0
    size: PositiveInt = 100_000_000
    slots: PositiveInt = 1

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        if reason := refusal(problem, base, gradients=True):
            return Unsupported(reason)
        size, count = piece_size(problem, base, self.size)
        found: list[Place] = []
        for place in even(count, self.ratio, "host", "device"):
            hosted = len(found) - found.count("device") + 1
            visits = place == "host" and hosted % self.interleave == 0
            found.append("visit" if visits else place)
        pieces = Pieces(size=size, places=tuple(found), slots=self.slots)
        return placed(problem, base, pieces, gradients=True)
