"""memo: swap a share alpha of every layer's tokens to the host, and recompute the other tokens.

Claim: the largest share whose copy is hidden by one layer's forward and that fits the host removes
nearly all activations from the device, with little recomputation: 52.30 % MFU at 7B and 1M tokens
on 8 A800.
Source: Zhao et al., MEMO, arXiv 2407.12117 v3. The layer input and the attention output are
offloaded entirely, so attention is never recomputed. Of every other saved tensor, alpha of the
tokens are offloaded and the rest are rebuilt just before the layer's backward. The model's last two
layers are exempt.
    alpha: (S_in + S_attn + alpha S_other) / B <= T_layer_forward      (a GPU's share of PCIe)
           n (S_in + S_attn + alpha S_other) <= M_host                 (its share of host memory)
with n = L - 2 layers (of all micro-batches in flight under pipeline parallelism). Two rounding
buffers alternate; after the backward of layer i + 2 the tensors of layer i are copied back.
Deviations: the row statistics of attention are offloaded with its output, and so are the tensors
that experts receive, because their rows are in another order. A split tensor is stored in two parts
(SPLIT and JOIN are copies on the device), so the rounding buffers hold the offloaded tensors, not
the whole layer. Under pipeline parallelism the last swapped layer of a chunk is copied from
separate memory during the next pass. If an eager norm saves copies instead of its input, the layer
input is kept and offloaded entirely, unless no token is rebuilt. Addresses are planned by best fit
(the paper's MIP gains nothing on these programs) if a step has at most 3,000 tensors; otherwise the
framework's allocator places tensors. Host memory is one pool of the planned size.
"""

from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from rematbench.method import (
    Fate,
    Fraction,
    NonNegativeInt,
    Offload,
    Plan,
    PositiveInt,
    Problem,
    Settings,
    Split,
    Transfers,
    Unsupported,
)
from rematbench.solve.kept import (
    holding_inputs,
    kept_activations,
    no_offload,
    refused_in_pieces,
    rule_of,
    with_live_rules,
)
from rematbench.solve.swap import SwapShare, swap_share

WHOLE = ("layer_input", "attn_out", "attn_heads", "lse", "permutation", "expert_in", "expert_probs")


class Memo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`alpha`: the share, or None for the largest share that both constraints allow. `host_bytes`:
    a node's pinned memory for activations (None: its host memory without the states). `buffers`:
    the number of rounding buffers (0: new memory for each layer)."""

    name: ClassVar[str] = "memo"
    grid: ClassVar[tuple[Settings, ...]] = (
        *({"alpha": a / 4} for a in range(5)),
        {"alpha": 1.0, "exempt_layers": 0},  # needs the fewest bytes: some jobs fit only with it
    )
    alpha: Fraction | None = None
    host_bytes: PositiveInt | None = None
    exempt_layers: NonNegativeInt = 2
    buffers: NonNegativeInt = 2

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        """Swap and recompute the activations that the base keeps, except in the last layers."""
        if reason := self._refusal(problem, base):
            return Unsupported(reason)
        other = tuple(sorted(kept_activations(problem, base) - set(WHOLE)))
        layers = tuple(range(problem.workload.model.num_layers - self.exempt_layers))
        whole, share = self._share(problem, base, other, layers)
        holding = holding_inputs(problem, base, other, whole=False)
        if share.alpha < 1.0 and holding != base:
            base = holding
            whole, share = self._share(problem, base, other, layers)
        fates: dict[tuple[str, ...], Fate] = {
            whole: Offload(),
            other: Split(offload=share.alpha, recompute=1.0 - share.alpha, scope="layer"),
        }
        rules = [rule_of(names, fate, layers) for names, fate in fates.items() if names]
        made = with_live_rules(problem, base, *rules)
        if made == base:
            return Unsupported(f"the base keeps no activation of layers {layers[0]}-{layers[-1]}")
        reason = refused_in_pieces(problem, made)
        return Unsupported(reason) if reason else _moved(made, share, self.buffers)

    def _share(
        self, problem: Problem, base: Plan, other: tuple[str, ...], layers: tuple[int, ...]
    ) -> tuple[tuple[str, ...], SwapShare]:
        """The tensors that are offloaded entirely, including a kept layer input, and the share of
        the `other` tensors."""
        kept = kept_activations(problem, base) | set(base.held)
        whole = tuple(name for name in WHOLE if name in kept)
        share = swap_share(
            problem,
            base,
            whole=whole,
            other=other,
            layers=layers,
            host_bytes=self.host_bytes,
            given=self.alpha,
        )
        return whole, share

    def _refusal(self, problem: Problem, base: Plan) -> str:
        """The reason why there is no plan; empty if there may be one."""
        shortest = min(sum(len(chunk) for chunk in rank) for rank in base.partition)
        if refused := no_offload(problem):
            return refused
        if problem.attention != "flash":
            return "needs fused attention: it cannot swap or rebuild materialised attention scores"
        if shortest <= self.exempt_layers:
            return (
                f"needs more than {self.exempt_layers} layers on every rank (the last "
                f"{self.exempt_layers} are not swapped), not {shortest}"
            )
        if not kept_activations(problem, base):
            return "the base keeps no activation to swap"
        return ""


def _moved(plan: Plan, share: SwapShare, buffers: int) -> Plan:
    """The plan with copies by layer through rounding buffers, and with a note of the share."""
    moves = Transfers(
        granularity="layer", prefetch_layers=max(1, buffers - 1), reload_slots=buffers
    )
    return replace(plan, transfers=moves, addresses="planned").noting(
        alpha=share.alpha,
        alpha_bandwidth=share.alpha_bandwidth,
        alpha_host=share.alpha_host,
        bound=share.bound,
    )
