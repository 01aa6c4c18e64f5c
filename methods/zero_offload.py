"""zero_offload: all optimizer states in host memory, updated by the CPU.

Claim: gradients are copied to the host during the backward, the CPU updates, and weights are copied
back piece by piece while the next pieces are updated, so a device holds 2 bytes a parameter instead
of 16.
Source: Ren et al., ZeRO-Offload, USENIX ATC 2021, arXiv 2101.06840; its CPU Adam copies tiles.
Deviations: its delayed parameter update, which trains with weights that are one step old, is
refused because it is not lossless. With several micro-batches, gradients are copied after each of
them.
"""

from typing import ClassVar

from msgspec import Struct

from rematbench.method import Pieces, Plan, PositiveInt, Problem, Unsupported
from rematbench.solve.state_pieces import piece_size, placed, refusal


class ZeroOffload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`size`: parameters of a piece. `delayed`: the delayed parameter update, which is refused."""

    name: ClassVar[str] = "zero_offload"
    moves_states: ClassVar[bool] = True
    size: PositiveInt = 100_000_000
    delayed: bool = False

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        if self.delayed:
            return Unsupported("delayed updates are one step old: not lossless; use delayed=false")
        if reason := refusal(problem, base, gradients=True):
            return Unsupported(reason)
        pieces = Pieces(size=piece_size(problem, base, self.size)[0], places=("host",))
        return placed(problem, base, pieces, gradients=True)
