"""mst: compute the MLP, and the LM head with its loss, in mini-sequences (pieces of the rows).

Claim: the temporary tensors that limit long sequences, which are the MLP's wide tensors and above
all the logits, shrink by the number of pieces, for a few per cent of time and without more saved
bytes.
Source: Luo et al., mini-sequence transformer (MsT), arXiv 2407.15892: MLP pieces of d rows (C = d,
so sequences up to d are not split), V / d pieces of the head (32 for Llama-3), the logits of a
piece recomputed in its backward; used with full recomputation and optimizer-in-backward.
`attention_chunks`: attention over slices of heads (Untied Ulysses, arXiv 2602.21196): queries, keys
and values exist for one slice at a time, and are projected (and sent) again in its backward.
Deviations: the rule makes at most 32 pieces of the MLP, because with more pieces the MLP no longer
sets the peak and kernels only become smaller. The loss's saved statistics are recomputed by piece
instead of kept. Weight gradients of the pieces are accumulated in place, as in autograd. Experts
are not split, and neither is the MLP if the base offloads or rebuilds a part of its inner tensors.
The loss's saved tensors are rebuilt by piece even if the base would offload them: they are as large
as the logits, which the pieces are meant to avoid.
"""

from math import ceil
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from rematbench.method import (
    VOCABULARY,
    MiniSequence,
    Plan,
    PositiveInt,
    Problem,
    Recompute,
    Rule,
    Select,
    Settings,
    Unsupported,
    refusal,
)
from rematbench.problem import completed_after_backward
from rematbench.solve.kept import kept_activations, parted_activations
from rematbench.solve.state_pieces import with_fates

MLP = ("fc1", "act", "mul", "fc2")
HEAD = ("lm_head", "loss")


class Mst(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`mlp_chunks`, `head_chunks`: pieces (None: the paper's rules, for the MLP up to
    `max_mlp_chunks`; 1: not split).
    `attention_chunks`: pieces of attention's heads (a rank's heads at most; 1: not split).
    `optimizer_in_backward`: update each layer as soon as its gradients are complete."""

    name: ClassVar[str] = "mst"
    pieces: ClassVar[bool] = True
    grid: ClassVar[tuple[Settings, ...]] = tuple(
        {"mlp_chunks": 1 << power, "head_chunks": 1 << power} for power in range(1, 11)
    )
    mlp_chunks: PositiveInt | None = None
    max_mlp_chunks: PositiveInt = 32
    head_chunks: PositiveInt | None = None
    attention_chunks: PositiveInt = 1
    optimizer_in_backward: bool = False

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        """Add mini-sequences to the base, and the rule for the loss's saved tensors."""
        late = completed_after_backward(problem) if self.optimizer_in_backward else ""
        parted = bool(base.slices) or base.schedule in VOCABULARY
        if reason := late or "the base's passes run slices or a shared vocabulary" * parted:
            return Unsupported(reason)
        if taken := {name for sequence in base.mini_sequences for name in sequence.ops}:
            return Unsupported(f"the base already computes {min(taken)} in mini-sequences")
        mlp, why = self._mlp_count(problem, base)
        model, rows = problem.workload.model, min(a.rows for a in problem.head.activations.values())
        head = min(self.head_chunks or ceil(model.vocab / model.hidden), rows)
        if refused := self._heads_refused(problem):
            return Unsupported(refused)
        added = [MiniSequence(ops, n) for ops, n in ((MLP, mlp), (HEAD, head)) if n > 1]
        if self.attention_chunks > 1:
            added.append(MiniSequence(_attention_ops(problem), self.attention_chunks, of="heads"))
        plan = replace(base, mini_sequences=(*base.mini_sequences, *added))
        if head > 1:
            plan, remark = _with_loss_by_piece(problem, plan)
            why |= remark
        if self.optimizer_in_backward:
            plan = with_fates(plan, replace(plan.state("optimizer"), update="backward"))
        return plan.noting(mlp_chunks=mlp, head_chunks=head, **why)

    def _mlp_count(self, problem: Problem, base: Plan) -> tuple[int, dict[str, str]]:
        """The number of pieces of the MLP, and a remark if it is not split."""
        tables, model, layout = problem.layer_kinds, problem.workload.model, problem.layout
        table = next((t for t in tables if any(op.name in MLP for op in t.ops)), tables[0])
        local = problem.workload.seq_len // (layout.cp * layout.ulysses)
        inner = {name for op in table.ops if op.name in MLP[:-1] for name in op.outputs}
        if parted := sorted(inner & parted_activations(problem, base)):
            names = ", ".join(parted)
            return 1, {"mlp": f"computed whole: the base offloads or rebuilds part of {names}"}
        if not inner:
            return 1, {"mlp": "computed whole: every layer has experts"}
        rows = min(table.activations[name].rows for name in ("fc2_out", *inner))
        rule = min(ceil(local / model.hidden), self.max_mlp_chunks)
        return min(self.mlp_chunks or rule, rows), {}

    def _heads_refused(self, problem: Problem) -> str:
        """The reason why attention cannot be computed over slices of heads, or an empty text."""
        if self.attention_chunks == 1:
            return ""
        lay, model = problem.layout, problem.workload.model
        refused = {
            "tensor parallelism, which splits heads": lay.tp > 1,
            "keys gathered over context parallelism": lay.cp > 1,
            "latent attention": model.latent is not None,
            "adapters": problem.workload.adapted,
        }
        heads = model.num_heads // lay.ulysses
        uneven = f"{self.attention_chunks} slices of {heads} heads of a rank are not equal"
        found = refusal("attention over slices of heads is not modelled with", refused)
        return found or uneven * bool(heads % self.attention_chunks)


def _attention_ops(problem: Problem) -> tuple[str, ...]:
    """The operators of a layer from the projection to queries to the end of attention."""
    names = [op.name for op in problem.layer(0).ops]
    return tuple(names[names.index("qkv") : names.index("proj")])


def _with_loss_by_piece(problem: Problem, plan: Plan) -> tuple[Plan, dict[str, str]]:
    """The plan with the loss's saved tensors rebuilt by piece, which overrides the rules of the
    base (for example a byte budget), and a remark if the base would offload or rebuild a part."""
    saved = problem.head.op("loss").saves
    parted = not parted_activations(problem, plan, "head").isdisjoint(saved)
    if not parted and kept_activations(problem, plan, "head").isdisjoint(saved):
        return plan, {}
    rule = Rule(Select(parts=("head",), activations=saved), Recompute(scope="consumer"))
    remark = (
        {"loss": "computed by piece: otherwise the base would offload or rebuild part of it"}
        if parted
        else {}
    )
    return plan.with_rules(rule), remark
