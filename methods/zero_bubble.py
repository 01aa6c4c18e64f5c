"""zero_bubble: weight gradients in separate passes, which fill the pipeline's bubble.

Claim: no other rank waits for a backward's weight gradients, so 1F1B's bubble (pp - 1)(F + B + W)
shrinks to (pp - 1)(F + B - W) with the first stage's memory, to (pp - 1)(F + B - 2 W) with twice
that. If a rank has two chunks and passes turn around at the last rank, ZB-V has no bubble with the
memory of 1F1B's first stage, V-Half half of the bubble with half of that memory, and V-Min two
thirds with a third.
Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), ZB-H1 and ZB-H2
of figures 2 and 3, and Pipeline Parallelism with Controllable Memory (arXiv 2405.15362). As here,
sail-sg/zero-bubble-pipeline-parallelism keeps a linear's input and its output's gradient until the
weight's gradient, and gathers a split input again.
Deviations: the orders are fixed, not those of the repository's solver. The last rank copies its
first chunk's output for its second chunk. A step starts when every rank has ended the step before,
so the shift between ranks, (pp - 1) F, remains (the paper checks gradient norms after the update).
The gradients of the embedding, and of linears that a base computes in pieces, are computed together
with input gradients. Whether the stack has the schedule is not checked.
"""

from typing import ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from rematbench.method import SHAPES, Plan, Problem, Settings, Shape, Unsupported, passes_refusal


class ZeroBubble(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`schedule`: every rank keeps the activations of pp micro-batches under zb-h1 and of 2 pp - 1
    under zb-h2; with two chunks on a rank, of pp under zb-v, pp / 2 + 1 under v-half and about (pp
    + 4) / 3 under v-min."""

    name: ClassVar[str] = "zero_bubble"
    moves_passes: ClassVar[bool] = True
    grid: ClassVar[tuple[Settings, ...]] = ({"schedule": "zb-h2"}, {"schedule": "zb-h1"})
    schedule: Literal["zb-h1", "zb-h2"] | Shape = "zb-h1"

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        lay, turns = problem.layout, self.schedule in SHAPES
        of = "interleaved_1f1b" if turns else "1f1b"
        other = "other passes" if base.orders or base.slices else base.schedule
        if lay.pp == 1 or other != of or (turns and lay.vpp != 2):
            needed = "two chunks on each of several stages (vpp 2)" if turns else "several stages"
            words = f"pp {lay.pp}, vpp {lay.vpp}, {other}"
            return Unsupported(f"needs {needed}, and passes in the order of {of}, not {words}")
        if turns and any(rule.select.stages or rule.select.chunks for rule in base.rules):
            return Unsupported("the base's rules select chunks, whose layers would change")
        made = replace(base, schedule=self.schedule)
        if self.schedule in SHAPES:
            made = base.turned(self.schedule)
        refused = passes_refusal(made, problem.layout, problem.system, problem.workload.model)
        return Unsupported(refused) if refused else made
