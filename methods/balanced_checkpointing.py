"""balanced_checkpointing: recompute only activations that take little time per freed byte.

Claim: rebuilding the outputs of both norms and of SiLU x up inside the linears that read them frees
a third of a layer's activations for well under one per cent of the layer's work.
Source: Yuan et al., USENIX ATC 2024, section on compute-memory balanced checkpointing.
Deviations: in layers with experts, the tensors of experts are treated like those of an MLP. The
paper's Pareto front could not be read; `front` computes one over all subsets of the saved
activations, with this problem's costs. The default is the point that the paper publishes.
"""

from typing import ClassVar, Literal

from msgspec import Struct

from rematbench.method import Fraction, Plan, Problem, Recompute, Scope, Settings, Unsupported
from rematbench.solve.kept import holding_inputs, kept_activations, rule_of
from rematbench.solve.pareto import candidates, cheapest_within, front
from rematbench.solve.recompute_modules import with_copies

PUBLISHED = ("attn_norm_out", "mlp_norm_out", "act_out", "fc2_in", "expert_fc2_in", "shared_fc2_in")
FC1 = ("gate_out", "up_out", "expert_fc1_out", "shared_gate_out", "shared_up_out")
MOST = 17
"""The most tensors of a layer for which `front` tries all subsets, which takes seconds."""


class BalancedCheckpointing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`point`: which tensors are dropped, from none over published, published+fc1 and all to full;
    or `front`: the fastest point of the computed front that keeps at most `keep_fraction` of a
    layer's bytes. `all` drops the same tensors as `full`, but runs only the operators that they
    need. `scope`: rebuild before each consumer, or at the start of the layer's backward (always,
    for `full`)."""

    name: ClassVar[str] = "balanced_checkpointing"
    grid: ClassVar[tuple[Settings, ...]] = tuple(
        {"point": point, "scope": scope}
        for scope in ("consumer", "layer")
        for point in ("published", "published+fc1", "all")
    )
    point: Literal["none", "published", "published+fc1", "all", "full", "front"] = "published"
    keep_fraction: Fraction = 0.7
    scope: Scope = "consumer"

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        count = max(len(candidates(table)) for table in problem.layer_kinds)
        if self.point == "front" and count > MOST:
            return Unsupported(f"front would try 2^{count} subsets of a layer (most: 2^{MOST})")
        kept = kept_activations(problem, base) - {"layer_input"}
        dropped = tuple(sorted(kept & self._dropped(problem)))
        if not dropped:
            why = "" if self.point == "none" else ": the base keeps none of the activations"
            return base.noting(balanced_checkpointing=f"no-op{why}")
        whole = self.point == "full"
        fate = Recompute(scope="layer" if whole else self.scope, whole=whole)
        base = holding_inputs(problem, base, dropped, whole)
        return base.with_rules(rule_of(dropped, fate)).noting(dropped=", ".join(dropped))

    def _dropped(self, problem: Problem) -> set[str]:
        tables = problem.layer_kinds
        table = max(tables, key=lambda each: each.saved_bytes)
        match self.point:
            case "none":
                return set()
            case "published":
                return {*with_copies(PUBLISHED)}
            case "published+fc1":
                return {*with_copies(PUBLISHED), *FC1}
            case "all" | "full":
                return {name for each in tables for name in each.saved}
        chosen = cheapest_within(front(problem, table), self.keep_fraction * table.saved_bytes)
        return set(chosen.dropped)
