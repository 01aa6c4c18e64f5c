"""selective_recompute: drop chosen activations and rebuild them just before use.

Claim: recomputing only core attention saves most activation bytes for a few per cent more work.
Source: Korthikanti et al. 2022 (arXiv 2205.05198, `--recompute-activations`); with `keep`, the
per-operator selective checkpointing of torchtitan (distributed/activation_checkpoint.py).
Deviations: with flash attention there are no scores to drop, so the default is a no-op with a note;
Megatron's flag would recompute the flash kernel without a benefit.
"""

from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from rematbench.plan import Plan, Recompute, Rule, Scope, Select, Unsupported
from rematbench.problem import Problem
from rematbench.solve.kept import holding_inputs, kept_activations

CORE_ATTENTION = ("attn_probs", "attn_probs_mask", "attn_probs_dropped")


class SelectiveRecompute(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`activations`: names to drop; `ops`: operators whose saved outputs are dropped; `keep`: drop
    all activations of a layer except these and its input.  If all are empty: drop the internals of
    unfused attention.  `scope`: rebuild before each consumer, or at the start of the layer's
    backward.  `held`: outputs that the policy caches although no backward reads them."""

    name: ClassVar[str] = "selective_recompute"
    activations: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    scope: Scope = "consumer"
    held: tuple[str, ...] = ()

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        """Recompute the chosen activations where the base keeps them."""
        tables = problem.layer_kinds
        known = {name for table in tables for name in table.activations}
        made = {op.name: op.outputs for table in tables for op in table.ops}
        unknown = sorted({*self.activations, *self.keep, *self.held} - known - set(CORE_ATTENTION))
        unknown += sorted(set(self.ops) - made.keys())
        if unknown:
            names = ", ".join(sorted(known))
            return Unsupported(
                f"a layer has no activation or operator {unknown[0]!r} (known: {names})"
            )
        kept = kept_activations(problem, base) - {"layer_input"}
        wanted = {*self.activations, *(name for op in self.ops for name in made[op])}
        if self.keep:
            wanted |= kept - set(self.keep)
        dropped = tuple(sorted(kept & (wanted or set(CORE_ATTENTION))))
        if not dropped:
            return base.noting(selective_recompute=f"no-op: {_why(problem, wanted)}")
        select = Select(parts=("layer",), activations=dropped, kept=True)
        rule = Rule(select, Recompute(scope=self.scope))
        base = holding_inputs(problem, base, dropped, whole=False)
        held = tuple(dict.fromkeys((*base.held, *self.held)))
        return replace(base.with_rules(rule), held=held).noting(dropped=", ".join(dropped))


def _why(problem: Problem, wanted: set[str]) -> str:
    if not wanted and problem.attention == "flash":
        return "flash attention saves no attention scores"
    return "the stack does not save the chosen activations, or the base does not keep them"
