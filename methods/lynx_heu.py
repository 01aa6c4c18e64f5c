"""lynx_heu: rebuild activations during collectives, with one policy for all equal layers of a
stage.

Claim: a policy for one layer, computed in a fraction of a second (0.16 s on average, 99 % less than
the optimal search), removes recomputation from the critical path. Recomputation overlaps with
tensor-parallel collectives of the backward, and runs before pipeline receives and in the pipeline's
bubbles: up to 1.37x faster than existing recomputation (v4; v1: 1.02 to 1.53x).
Source: Chen et al., Lynx, arXiv 2406.08756 v4. Its recomputation-aware partitioning moves layers
between stages until their times balance, with the recomputation that each stage needs to fit.
Deviations: the equations could not be read, so the formulation is ours (solve/layer_policies.py).
For every set of operators of one layer whose outputs can be dropped, recomputation is placed
greedily into windows, which gives a front of kept bytes against exposed seconds; a stage takes the
cheapest point that its memory allows. Windows in the forward are not used; operators with
collectives are never placed in a window.
"""

from typing import ClassVar

from msgspec import Struct

from rematbench.method import Plan, Problem, Unsupported
from rematbench.solve.stage_times import relocated


class LynxHeu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`repartition`: move layers between stages until their times balance (vpp = 1)."""

    name: ClassVar[str] = "lynx_heu"
    planner: ClassVar[bool] = True
    repartition: bool = True

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        return relocated(problem, base, exact=False, repartition=self.repartition)
