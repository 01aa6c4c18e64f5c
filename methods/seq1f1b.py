"""seq1f1b: 1F1B over slices of a sequence.

Claim: a slice's activations are 1 / k of a sequence's, and so is the bubble: sequences four times
as long train on the same devices, 1.14 to 1.53 times faster than under 1F1B.
Source: Sun et al., Seq1F1B, arXiv 2406.03488; MayDomine/Seq1F1B f54b286. Rank r keeps (pp - r - 1 +
k) / k micro-batches, the bubble is (pp - 1) / (k m), and slices have equal FLOPs, so later slices
are shorter. A slice's keys and values stay until its backward.
Deviations: interleaved groups consist of whole sequences. The degree of sequence parallelism
divides the lengths of slices. Whether the stack has the schedule is not checked.
"""

from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from rematbench.method import Plan, PositiveInt, Problem, Settings, Unsupported
from rematbench.solve.slices import equal_work, even, refused


class Seq1F1B(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`slices`: the number of slices; `equal`: whether slices have equal lengths instead of equal
    FLOPs; `interleaved`: whether a rank has several chunks."""

    name: ClassVar[str] = "seq1f1b"
    moves_passes: ClassVar[bool] = True
    grid: ClassVar[tuple[Settings, ...]] = tuple({"slices": 2**n} for n in range(1, 6))
    slices: PositiveInt = 4
    equal: bool = False
    interleaved: bool = False

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        if reason := refused(problem, base, self.slices, interleaved=self.interleaved):
            return Unsupported(reason)
        if self.slices == 1:
            return base
        lengths = (even if self.equal else equal_work)(problem, self.slices)
        if not lengths:
            return Unsupported(f"no {self.slices} slices fit {problem.workload.seq_len} tokens")
        return replace(base, slices=lengths) if self.interleaved else base.sliced(lengths)
