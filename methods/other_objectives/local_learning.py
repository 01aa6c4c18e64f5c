"""local_learning: train each block of a pipeline with a separate loss; no gradient leaves a block.

Claim: each block keeps the activations of one micro-batch, no gradient is sent back, and blocks
wait only for their inputs, so a pipeline has no bubble once it is filled.
Source: local updates (Laskin et al., arXiv 2012.03837), PPLL (arXiv 2411.12780) and synthetic
labels (arXiv 2403.11204).
Deviations: this is another objective, not lossless: `--methods` must name this folder, and no
comparison or search offers it. Every block has a head like the model's, with the model's labels;
the papers use auxiliary networks for images, or fixed random labels, which have fewer parameters.
Instead of PPLL's queues there are a pipeline's messages, one for each micro-batch.
"""

from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from rematbench.method import Pass, Plan, Problem, Unsupported

OBJECTIVE = "another objective, not lossless"


class LocalLearning(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every virtual stage is a block."""

    name: ClassVar[str] = "local_learning"

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        lay = problem.layout
        if lay.pp == 1:
            return Unsupported("needs pp > 1, because its blocks are the stages of a pipeline")
        if lay.vpp > 1:
            return Unsupported(f"needs a pipeline without interleaving, not vpp {lay.vpp}")
        order = tuple(
            Pass(forward, number, 0)
            for number in range(lay.num_micro_batches)
            for forward in (True, False)
        )
        cuts = tuple(range(1, lay.pp))
        plan = replace(base, cuts=cuts, orders=(order,) * lay.pp)
        return plan.noting(objective=OBJECTIVE)
