"""twinflow: a share of the optimizer states in host memory, the others on the device.

Claim: with a ratio below 1 the device keeps and updates a share of the states, so the CPU has less
to update.
Source: TwinFlow in DeepSpeed (blogs/deepspeed-offloadpp, 2023; stage3.py 0.19.8, `ratio`), where
the ratio is one of sub-groups, which are updated one after another.
Deviations: pieces have equal sizes; a sub-group ends at the end of a tensor.
"""

from functools import partial
from typing import ClassVar

from msgspec import Struct

from rematbench.method import Fraction, Pieces, Plan, PositiveInt, Problem, Settings, Unsupported
from rematbench.solve.state_pieces import even, piece_size, placed, refusal, smallest_share


class Twinflow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ratio`: the share of pieces on the host (None: the smallest that fits). `size`: parameters
    of a piece."""

    name: ClassVar[str] = "twinflow"
    moves_states: ClassVar[bool] = True
    grid: ClassVar[tuple[Settings, ...]] = tuple({"ratio": k / 4} for k in range(1, 5))
    ratio: Fraction | None = None
    size: PositiveInt = 100_000_000

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        if reason := refusal(problem, base, gradients=True):
            return Unsupported(reason)
        share, bound = self.ratio, "given"
        if share is None:
            share, bound = smallest_share(problem, base, self.size, partial(self.at, problem, base))
        return self.at(problem, base, share).noting(ratio=share, bound=bound)

    def at(self, problem: Problem, base: Plan, ratio: float) -> Plan:
        size, count = piece_size(problem, base, self.size)
        places = even(count, ratio, "host", "device")
        pieces = Pieces(size=size, places=places, slots=0)
        return placed(problem, base, pieces, gradients=True)
