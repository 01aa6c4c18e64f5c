"""lynx_opt: rebuild activations during collectives; a MILP chooses tensors and windows.

Claim: the optimum that the heuristic (lynx_heu) approaches at 1 % of the search time: the tensors
to rebuild and their windows, with the fewest exposed seconds of recomputation.
Source: Chen et al., Lynx, arXiv 2406.08756 v4 (headline as in lynx_heu).
Deviations: the equations could not be read, so the formulation is ours (solve/layer_policies.py).
Groups of layers of a stage (a half, a quarter, ...) share binary variables for each operator and
window. Each stage has one memory constraint over all groups, with the micro-batches in flight; the
objective is the exposed seconds of recomputation of all layers. HiGHS runs with a node limit and a
relative gap of 0.001. The ledger checks the memory, and the budget is reduced if the linear model
was wrong. The heuristic's plan is a candidate too, so the simulated step is never longer than with
lynx_heu.
"""

from typing import ClassVar

from msgspec import Struct

from rematbench.method import Plan, Problem, Unsupported
from rematbench.solve.stage_times import relocated


class LynxOpt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`repartition`: move layers between stages until their times balance (vpp = 1)."""

    name: ClassVar[str] = "lynx_opt"
    planner: ClassVar[bool] = True
    repartition: bool = True

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        return relocated(problem, base, exact=True, repartition=self.repartition)
