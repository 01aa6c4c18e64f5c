"""lynx_opt: rebuild activations beside collectives, tensors and windows chosen by a MILP.

Claim: the optimum that the heuristic (lynx_heu) approaches at 1 % of the search time: retain or
rebuild each tensor, and in which window, so that least recomputation is exposed.
Source: Chen et al., Lynx, arXiv 2406.08756 v4 (headline as in lynx_heu).
Deviations: the equations could not be read, so the formulation is ours (solve/lynx.py): groups of
layers of a stage (a half, a quarter, ...) share binary variables for each operator and window;
one memory constraint per stage over all groups, with layers in flight; objective, the exposed
recompute seconds of all layers.  HiGHS with a node limit and a relative gap of 0.001; memory is
verified by the ledger and the budget tightened where the linear model was wrong.  The plan of the
heuristic is a candidate too, so that the simulated step is never longer than with lynx_heu.
"""

from typing import ClassVar

from msgspec import Struct

from rematbench.plan import Plan, Unsupported
from rematbench.problem import Problem
from rematbench.solve.stage_times import relocated


class LynxOpt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`repartition`: move layers between stages until their times balance (vpp = 1)."""

    name: ClassVar[str] = "lynx_opt"
    planner: ClassVar[bool] = True
    repartition: bool = True

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        """Rebuild what must go for the plan to fit, where it costs least."""
        lay = problem.layout
        if lay.tp == lay.pp == lay.cp == lay.ulysses == 1:
            return Unsupported("needs tp, cp or pp > 1: there is no communication to hide beside")
        return relocated(problem, base, exact=True, repartition=self.repartition)
