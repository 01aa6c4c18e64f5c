"""selective_recompute: drop chosen activations and rebuild them just before they are used.

Claim: recomputing only core attention frees most activation bytes for a few per cent more work.
Source: Korthikanti et al. 2022 (arXiv 2205.05198, `--recompute-activations`). `keep` is the
per-operator selective checkpointing of torchtitan (distributed/activation_checkpoint.py), `modules`
that of Megatron-core 0.16.1 (`--recompute-modules`).
Deviations: with flash attention there are no scores to drop, so the default has no effect, and the
plan says so; Megatron-LM's option would recompute the flash kernel without a benefit.
"""

from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from rematbench.method import Plan, Problem, Rule, Scope, Unsupported
from rematbench.solve.kept import holding_inputs, kept_activations, with_live_rules
from rematbench.solve.recompute_modules import (
    CORE_ATTENTION,
    Module,
    before_experts,
    chosen_layers,
    modules_dropped,
    needs_original,
    rebuilding,
    with_copies,
)

AT_ONCE = ("moe", "shared_experts")
"""The modules that Megatron-core recomputes as a whole, before their backward."""


class SelectiveRecompute(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`modules`: Megatron-core's modules to recompute; `activations`: names to drop; `ops`:
    operators whose saved outputs are dropped; `keep`: drop all activations of a layer except these
    and its input. If all four are empty, the tensors inside unfused attention are dropped. `scope`:
    rebuild before each consumer, or at the start of the layer's backward. `held`: outputs that the
    policy caches although no backward reads them (not on a compiled stack). `layers`: only in these
    layers (`0-5,20`; empty: in all)."""

    name: ClassVar[str] = "selective_recompute"
    modules: tuple[Module, ...] = ()
    activations: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    scope: Scope = "consumer"
    held: tuple[str, ...] = ()
    layers: str = ""

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        tables, layers = problem.layer_kinds, None
        if self.layers:
            chosen = chosen_layers(base, self.layers)
            if isinstance(chosen, str):
                return Unsupported(chosen)
            layers, tables = chosen, tuple(map(problem.layer, chosen))
        known = {name for table in tables for name in table.activations}
        made = {op.name: op.outputs for table in tables for op in table.ops}
        unknown = sorted({*self.activations, *self.keep, *self.held} - known - set(CORE_ATTENTION))
        unknown += sorted(set(self.ops) - made.keys())
        if unknown:
            names = ", ".join(sorted(known))
            return Unsupported(
                f"a layer has no activation or operator {unknown[0]!r} (known: {names})"
            )
        model = problem.workload.model
        lacking = [m for m in self.modules if m == "mla_up_proj" and model.latent is None]
        if self.modules and (
            lacking or known.isdisjoint(with_copies(modules_dropped(self.modules)))
        ):
            return Unsupported(
                f"no layer of {model.name} has {' or '.join(lacking or self.modules)}"
            )
        if refused := needs_original(self.modules, problem):
            return Unsupported(refused)
        kept = kept_activations(problem, base) - {"layer_input"}
        modules = {*with_copies(modules_dropped(self.modules))}
        routed = before_experts(problem) if "layernorm" in self.modules else ()
        modules -= {*with_copies(["attn_norm_out"])} if routed else set()
        wanted = {*modules, *self.activations, *(name for op in self.ops for name in made[op])}
        if self.keep:
            wanted |= kept - set(self.keep)
        dropped = tuple(sorted(kept & known & (wanted or set(CORE_ATTENTION))))
        if not dropped:
            return base.noting(selective_recompute=f"no-op: {_why(problem, wanted)}")
        base = holding_inputs(problem, base, dropped, whole=False)
        # No operator reads the tokens that experts send back, if the whole module is recomputed.
        sent = "combined" if problem.layout.ep > 1 else "unsorted"
        again = (sent,) if "moe" in self.modules else ()
        cached = () if problem.system.kernels.compiled else self.held
        held = tuple(dict.fromkeys((*base.held, *cached, *again)))
        base = replace(base, held=held)
        norm = () if "mlp" in self.modules else routed
        rules = self._rules((*dropped, *again), norm, layers)
        plan = with_live_rules(problem, base, *rules) if layers else base.with_rules(*rules)
        return plan.noting(dropped=", ".join(dropped))

    def _rules(
        self, dropped: tuple[str, ...], routed: tuple[int, ...], layers: tuple[int, ...] | None
    ) -> list[Rule]:
        """Rules for the tensors of modules that are recomputed as a whole, and for all other
        tensors, in `layers` (None: in all layers). Rules for the norm before experts are for the
        layers `routed`."""
        module = {*with_copies(modules_dropped(m for m in self.modules if m in AT_ONCE))}
        module |= {"combined", "unsorted"}
        parts: dict[Scope, tuple[str, ...]] = {
            "layer": tuple(name for name in dropped if name in module),
            self.scope: tuple(n for n in dropped if self.scope == "layer" or n not in module),
        }
        return [
            rule
            for scope, names in parts.items()
            for rule in rebuilding(names, scope, routed, layers)
        ]


def _why(problem: Problem, wanted: set[str]) -> str:
    if not wanted and problem.attention == "flash":
        return "flash attention saves no attention scores"
    return "the stack does not save the chosen activations, or the base does not keep them"
