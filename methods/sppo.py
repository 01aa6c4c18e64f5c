"""sppo: 1F1B over slices of a sequence that all offload the same number of bytes.

Claim: with slices that overlap each other's copies, sequences of four million tokens train on 128
A100, up to 3.38 times faster than with Megatron-LM and DeepSpeed.
Source: Chen et al., SPPO, arXiv 2503.10377. Slices have equal FLOPs and about 2,000 to 16,000
tokens. A share alpha_i of the activations A_i of slice i is copied to the host; alpha_i A_i is the
same for all slices, so that the same compute hides each copy. Keys and values stay on the device.
Deviations: alpha is the smallest share that fits (the paper chooses it so that copies are hidden).
Tensors are offloaded whole, the largest first, and are not rebuilt. Whether the stack has the
schedule is not checked.
"""

from typing import ClassVar

from msgspec import Struct

from rematbench.method import (
    ByteBudget,
    Fraction,
    NonNegativeInt,
    Plan,
    PositiveInt,
    Problem,
    Rule,
    Select,
    Settings,
    Unsupported,
)
from rematbench.solve.kept import kept_activations, no_offload, smallest_fitting, with_live_rules
from rematbench.solve.slices import equal_work, refused

KEYS = ("k", "v")


class Sppo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`alpha`: the mean share that is offloaded (None: the smallest that fits, of `steps`).
    `tokens`: the mean length of a slice.  Tensors below `min_bytes` stay on the device."""

    name: ClassVar[str] = "sppo"
    moves_passes: ClassVar[bool] = True
    grid: ClassVar[tuple[Settings, ...]] = tuple({"tokens": 2048 * 2**n} for n in range(4))
    alpha: Fraction | None = None
    tokens: PositiveInt = 8192
    steps: PositiveInt = 20
    granularity: PositiveInt = 1 << 20
    min_bytes: NonNegativeInt = 1 << 20

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        work = problem.workload
        reason = refused(problem, base, 1) or no_offload(problem) or refused(problem, base)
        if reason:
            return Unsupported(reason)
        lengths = equal_work(problem, max(2, -(-work.seq_len // self.tokens)))
        names = tuple(sorted(kept_activations(problem, base) - set(KEYS)))
        if not lengths or not names:
            why = "the base keeps no activation" if lengths else "the slices would be too short"
            return Unsupported(f"{why} ({work.seq_len} tokens)")
        made, alpha = base.sliced(lengths), self.alpha
        if alpha is None:
            step = smallest_fitting(
                problem, lambda n: self._moved(problem, made, names, n / self.steps), self.steps
            )
            alpha = 1.0 if step is None else step / self.steps
        return self._moved(problem, made, names, alpha).noting(alpha=alpha, slices=len(lengths))

    def _moved(self, problem: Problem, plan: Plan, names: tuple[str, ...], alpha: float) -> Plan:
        """The plan in which every slice offloads as many bytes as `alpha` of the mean slice."""
        if not alpha:
            return plan
        mean = sum(plan.slices) / len(plan.slices)
        rules = [
            Rule(
                Select(parts=("layer",), activations=names, slices=(number,), kept=True),
                ByteBudget(
                    alpha=min(1.0, alpha * mean / tokens),
                    granularity=self.granularity,
                    min_bytes=self.min_bytes,
                ),
            )
            for number, tokens in enumerate(plan.slices)
        ]
        return with_live_rules(problem, plan, *rules)
