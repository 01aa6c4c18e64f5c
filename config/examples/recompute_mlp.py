"""recompute_mlp: drop what the MLP saves and run it again in the backward.

Claim: frees most of a layer's activation bytes for one more forward of the MLP.
Source: ours, the example of docs/own_method.md.
Deviations: none.
"""

from typing import ClassVar

from msgspec import Struct

from rematbench.method import Plan, Problem, Recompute, Rule, Select
from rematbench.solve.kept import with_live_rules

MLP = ("gate_out", "up_out", "act_out", "fc2_in")


class RecomputeMlp(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No parameters."""

    name: ClassVar[str] = "recompute_mlp"

    def plan(self, problem: Problem, base: Plan) -> Plan:
        """Rebuild what the base keeps of the MLP at the start of each layer's backward."""
        select = Select(parts=("layer",), activations=MLP, kept=True)
        return with_live_rules(problem, base, Rule(select, Recompute(scope="layer")))
