"""pp_offload: offload a fixed share of every chunk's activations during passes of other chunks.

Claim: under interleaved 1F1B a chunk's copies to and from the host are hidden by the backward of
another chunk, so memory falls by up to the share alpha for almost no time.
Source: Yuan et al., USENIX ATC 2024, pipeline-parallel-aware offloading; artifact
kwai/Megatron-Kwai. All ranks offload the same share of bytes, rounded up to 1 MiB, the largest
tensors first. In the warm-up a copy ends before the send. In the steady state the last rank's last
chunk is exempt, because its backward follows at once. There are two fixed reload buffers, used in
turn, and a copied chunk is freed two passes after its forward: together these are the four chunk
buffers in the paper's memory model. Buffers and releases are read from the artifact
(megatron/core/pipeline_parallel/offload.py and schedules.py).
Deviations: tensors that the base recomputes or offloads are not part of alpha's total. Above one
half the artifact takes the smallest tensors first (in order not to split FC1's output). "The copy
ends before the send" is read as the copy that runs during a pass, not the copy of that pass's own
tensors: waiting for the latter would lengthen every step in which the pipeline fills, which the
published times do not show.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from rematbench.method import (
    MIB,
    ByteBudget,
    Fraction,
    NonNegativeInt,
    Plan,
    PositiveInt,
    Problem,
    Rule,
    Select,
    Settings,
    Transfers,
    Unsupported,
)
from rematbench.solve.kept import (
    kept_layer_bytes,
    no_offload,
    refused_in_pieces,
    smallest_fitting,
    with_live_rules,
)


class PpOffload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`alpha`: the share, or None for the smallest share that fits: with `fit` paper by the paper's
    estimator and `cap_bytes`, with `fit` ledger by our peak and the cluster's usable bytes, in
    `steps` steps from 0 to 1 (alpha is published to three decimals)."""

    name: ClassVar[str] = "pp_offload"
    grid: ClassVar[tuple[Settings, ...]] = tuple({"alpha": a / 4} for a in range(1, 5))
    share: ClassVar[tuple[str, int]] = ("alpha", 32)
    alpha: Fraction | None = None
    fit: Literal["paper", "ledger"] = "ledger"
    steps: PositiveInt = 1000
    cap_bytes: PositiveInt = 65_000 * MIB
    granularity: PositiveInt = MIB
    min_bytes: NonNegativeInt = MIB
    reload_slots: Annotated[int, Meta(ge=0, le=8)] = 2
    release_lag: PositiveInt = 2

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        pp = problem.layout.pp
        if pp < 3:
            return Unsupported(f"needs pp >= 3 so that copies have passes to hide behind, not {pp}")
        if reason := no_offload(problem):
            return Unsupported(reason)
        alpha, bound = self._share(problem, base)
        if reason := self._refusal(problem, base, alpha):
            return Unsupported(reason)
        return self.at(problem, base, alpha).noting(alpha=alpha, bound=bound)

    def _share(self, problem: Problem, base: Plan) -> tuple[float, str]:
        if self.alpha is not None:
            return self.alpha, "given"
        if self.fit == "paper":
            estimator = problem.cost.pipeline_offload_estimator(kept_layer_bytes(problem, base))
            alpha = estimator.smallest_alpha(self.cap_bytes)
            fits = alpha < 1.0 or estimator.peak_bytes(alpha) <= self.cap_bytes
            return alpha, "paper estimate" if fits else "no share fits by the paper's estimate"
        if problem.cost.headroom_bytes(base) >= 0:
            return 0.0, "device ledger"
        nothing = (
            "no share leaves the reserve free"
            if problem.reserve_bytes
            else "no share fits the device memory"
        )
        if self._refusal(problem, base, 1.0):
            return 1.0, nothing
        steps = smallest_fitting(
            problem, lambda k: self.at(problem, base, k / self.steps), self.steps
        )
        if steps is None:
            return 1.0, nothing
        return steps / self.steps, "device ledger"

    def _refusal(self, problem: Problem, base: Plan, alpha: float) -> str:
        """The reason why alpha of the kept bytes cannot be offloaded; empty if it can."""
        made = self.at(problem, base, alpha)
        if alpha > 0.0 and made == base:
            return "the base keeps no activation of the chunks that are offloaded"
        return refused_in_pieces(problem, made)

    def at(self, problem: Problem, base: Plan, alpha: float) -> Plan:
        if alpha == 0.0:
            return base
        budget = ByteBudget(alpha=alpha, granularity=self.granularity, min_bytes=self.min_bytes)
        rules = [Rule(select, budget) for select in offloaded(problem, base)]
        moves = Transfers(
            before_send_phases=("warmup",),
            reload_slots=self.reload_slots,
            release_lag=self.release_lag,
        )
        made = with_live_rules(problem, base, *rules)
        return base if made == base else replace(made, transfers=moves)


def offloaded(problem: Problem, base: Plan) -> list[Select]:
    """All activations except those of the last rank's last chunk, whose backward follows its
    forward at once. That chunk is included if all forwards come first: under GPipe, or under
    interleaving with one group of micro-batches."""
    lay = problem.layout
    last = lay.pp - 1
    one_group = base.schedule == "interleaved_1f1b" and lay.num_micro_batches == lay.pp
    if base.schedule == "gpipe" or one_group:
        return [Select(kept=True)]
    selects = [Select(stages=tuple(range(last)), kept=True)]
    if lay.vpp > 1:
        selects.append(Select(stages=(last,), chunks=tuple(range(lay.vpp - 1)), kept=True))
    return selects
