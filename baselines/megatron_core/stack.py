"""The tensors that Megatron-core 0.16.1 without TransformerEngine keeps in addition to the operator
table's.

Sizes come from shapes; per layer they equal the traced bytes (tests/baselines/test_stack.py).
"""

from collections.abc import Iterator
from functools import partial

from baselines.megatron_core import attention, offloads
from baselines.megatron_core.plan import MegatronCore
from rematbench.engine.program.program import RankProgram
from rematbench.inputs.shapes import shapes
from rematbench.problem import Problem
from rematbench.worlds.packages.stack import Extra, Stack


def stack(policy: MegatronCore, problem: Problem) -> Stack:
    extras = _Extras(policy, problem)
    return Stack(
        extras=(
            *extras.norms(),
            *extras.rope(),
            *extras.glu(),
            *extras.embedding(),
            *attention.inside(policy, problem),
            *extras.adds(),
            *extras.sums(),
            *extras.scattered(),
            *extras.tied(),
            *extras.head_norms(),
            *extras.counts(),
            extras.labels(),
        ),
        fused_swiglu=policy.bias_activation_fusion,
        shares_gathers=extras.s.sp,
        loss_over_logits=True,  # the logits may be an fp32 copy
        once=_once(policy, problem),
    )


def activation_peak(policy: MegatronCore, _: Problem, rank: RankProgram) -> int:
    found: int = offloads.activation_peak(policy, rank)
    return found


class _Extras:
    """Makes the extra tensors; those of `made` have a row per token, in the job's precision."""

    def __init__(self, policy: MegatronCore, problem: Problem) -> None:
        self.policy, self.problem, self.model = policy, problem, problem.workload.model
        self.s = shapes(problem.workload, problem.layout, problem.system)
        self.e = self.s.element_bytes
        self.made = partial(Extra, dtype=problem.workload.precision, rows=self.s.tokens)

    def glu(self) -> Iterator[Extra]:
        if self.model.gated and not self.policy.bias_activation_fusion:
            yield self.made(
                name="up_out_offset",
                row_bytes=self.s.ffn * self.e,
                producer="mul",
                saved_by="mul",
                why="glu_linear_offset (0) is added to up_out before the product",
            )

    def rope(self) -> Iterator[Extra]:
        s, e, latent = self.s, self.e, self.model.latent
        rotates = self.model.position == "rope"
        if rotates or latent is not None:
            yield self.made(
                name="rope_tables",
                producer="q_up" if latent else "qkv",
                rows=s.seq_len // s.cp,
                row_bytes=4 * (latent.rope if latent else self.model.head_dim) * e,
                saved_by="attention",
                why="cosine and sine of each position, for q and for k",
            )
        if latent is not None:
            return
        kept = self.policy.recompute != "selective" or "core_attn" not in self.policy.modules
        grouped = s.kv_width < s.q_width and s.cp == 1 and kept
        views = () if rotates else tuple(self._views(repeated=grouped))
        if grouped:
            yield self.made(
                name="kv_repeated",
                row_bytes=2 * (s.q_width - s.kv_width) * e,
                producer="attention",
                saved_by="attention",
                why="k and v are saved once per query head (and the view of v is freed)",
            )
        if grouped and not views:
            copied = s.q_width * (s.kv_width > self.model.head_dim)  # q is copied before k rotates
            rotated = (s.kv_width + copied) * rotates
            yield self.made(
                name="qkv_variable",
                row_bytes=(s.q_width + 2 * s.kv_width + rotated) * e,
                producer="attention",
                forward=True,
                why="the projection's output, of which copies are saved: a variable keeps it until "
                "the function returns",
            )
        if rotates and not grouped:
            yield self.made(
                name="qkv_before_rope",
                producer="qkv",
                row_bytes=(s.q_width + s.kv_width) * e,
                saved_by="attention",
                why="v is a view of the projection's output, which keeps q and k before RoPE alive",
            )
        yield from views

    def _views(self, *, repeated: bool) -> Iterator[Extra]:
        """Tensors that are alive because others are views of the projection's output, for models
        without RoPE. q is a view if a rank has one group of heads, and a copy if it has more; k and
        v are views unless they are repeated."""
        s, one = self.s, self.s.kv_width == self.model.head_dim
        merged = one and self.problem.attention != "flash" and s.micro_batch > 1  # q is copied, too
        if s.q_width != s.kv_width and one == repeated and not merged:
            yield self.made(
                name="qkv_beside_views",
                row_bytes=(2 * s.kv_width if one else s.q_width) * self.e,
                producer="qkv",
                saved_by="attention",
                why="views keep the projection's whole output alive, of which k and v, or q, are "
                "saved a second time",
            )

    def counts(self) -> Iterator[Extra]:
        if self.model.experts is not None and self.model.experts.aux_loss:
            yield Extra(
                name="expert_counts",
                dtype="int64, fp32",
                rows=1,
                row_bytes=8 * self.model.experts.count + 4,
                producer="router",
                saved_by="router",
                why="numbers of tokens by expert, and the factor of the auxiliary loss",
            )

    def head_norms(self) -> Iterator[Extra]:
        """1/rms of each head of queries and keys, and the projection's output. Its queries and
        values exist twice: the norm of queries and attention make copies."""
        if not self.model.qk_norm:
            return
        for op, width in {"q_norm": self.s.q_width, "k_norm": self.s.kv_width}.items():
            yield self.made(
                name=f"{op}_statistics",
                dtype="fp32",
                row_bytes=4 * width // self.model.head_dim,
                producer=op,
                saved_by=op,
                why="1/rms of each head",
            )
        yield self.made(
            name="qkv_beside_norms",
            row_bytes=(self.s.q_width + self.s.kv_width) * self.e,
            producer="qkv",
            saved_by="k_norm",
            why="the norm of keys saves a view, which keeps the projection's whole output alive",
        )

    def norms(self) -> Iterator[Extra]:
        rms, there = self.model.norm == "rmsnorm", {op.name for op in self.problem.layer(0).ops}
        for op in ("q_latent_norm", "kv_latent_norm", "attn_norm", "mlp_norm", "final_norm"):
            if op in there or op == "final_norm":
                yield self.made(
                    name=f"{op}_statistics",
                    dtype="fp32" if rms else self.problem.workload.precision,
                    rows=self.s.shard_tokens,
                    row_bytes=4 if rms else 2 * self.e,
                    producer=op,
                    saved_by=op,
                    part="head" if op == "final_norm" else "layer",
                    why="1/rms of each row" if rms else "mean and 1/deviation of each row",
                )

    def embedding(self) -> Iterator[Extra]:
        if self.s.tp > 1:
            yield self.made(
                name="masked_ids",
                dtype="int64 + bool",
                row_bytes=9,
                producer="embedding",
                saved_by="embedding",
                part="embedding",
                why="ids by this rank's rows of the vocabulary, and a mask of the other ranks' ids",
            )

    def adds(self) -> Iterator[Extra]:
        """The operands of a residual addition, after the separate operators of bias and dropout."""
        steps = self.model.proj_bias + (self.model.dropout > 0)
        for op in ("attn_add", "mlp_add") if steps else ():
            yield self.made(
                name=f"{op}_operands",
                rows=self.s.shard_tokens,
                row_bytes=steps * self.model.hidden * self.e,
                producer=op,
                forward=True,
                why="the operand with its bias, and after dropout: variables keep them until the "
                "sum exists (_bias_dropout_add)",
            )

    def labels(self) -> Extra:
        return self.made(
            name="label_rows",
            dtype="int64, fp32, bool",
            row_bytes=(4 if self.problem.layout.micro_batch > 1 else 3) * 8 + 3 * 4 + 1,
            producer="loss",
            saved_by="loss",
            part="head",
            why="labels: clamped, transposed, of this rank; row numbers; the highest logit and the "
            "label's logit; a mask",
        )

    def sums(self) -> Iterator[Extra]:
        """Gradients of weights, each alive together with the buffer to which it is then added. The
        gradient of a bias is alive at the same time only for qkv: other biases, and positions, are
        added by separate operators."""
        model, problem = self.model, self.problem
        words = self.s.vocab * model.hidden
        apart = {
            "proj": model.proj_bias * model.hidden,
            "fc2": model.mlp_bias * model.hidden,
            "fc1": model.mlp_bias * self.s.ffn,
            "embedding": min(words, problem.embedding.parameters - words),
        }
        for table in (problem.embedding, problem.layer(0), problem.head):
            for op in (one for one in table.ops if one.has_weight):
                yield self.made(
                    name=f"{op.name}_weight_gradient",
                    rows=1,
                    row_bytes=(op.parameters - apart.get(op.name, 0)) * self.e,
                    producer=op.name,
                    part=table.part,
                    why="a separate kernel adds it to the gradient buffer",
                )

    def scattered(self) -> Iterator[Extra]:
        """Shards of input gradients under sequence parallelism. The gradient of a gathered input is
        reduce-scattered into a new tensor, and the whole gradient stays alive while the weight's
        gradient is computed."""
        for table in (self.problem.layer(0), self.problem.head) if self.s.sp else ():
            for op in (one for one in table.ops if one.has_weight and one.gathered_bytes):
                yield self.made(
                    name=f"{op.name}_input_gradient_shard",
                    rows=self.s.shard_tokens,
                    row_bytes=self.model.hidden * self.e,
                    producer=op.name,
                    part=table.part,
                    why="alive with the weight's gradient and the whole input gradient",
                )

    def tied(self) -> Iterator[Extra]:
        if self.model.tied_embeddings and self.problem.layout.pp == 1:
            yield self.made(
                name="tied_gradient_sum",
                rows=self.s.vocab,
                row_bytes=self.model.hidden * self.e,
                producer="embedding",
                part="embedding",
                why="the sum of the embedding's and the output projection's gradients: one weight",
            )


def _once(policy: MegatronCore, problem: Problem) -> dict[str, int]:
    """Bytes of tensors that exist once. Gathered inputs and the first operand of the scores use the
    same buffer; all layers share the ids and angles of positions."""
    s = shapes(problem.workload, problem.layout, problem.system)
    model = problem.workload.model
    scores = s.tokens * s.heads * s.seq_len * s.element_bytes
    gathered = s.tokens * model.hidden * s.element_bytes if s.sp else 0
    unfused = problem.attention != "flash"
    found = {
        "memory buffer": max(gathered, scores) if unfused else gathered,
        "position ids": 8 * s.seq_len // s.cp,
        "routing": _routing(policy, problem) * s.shard_tokens,
    }
    if model.latent is not None:  # each layer of a rank has a table
        layers = -(-model.num_layers // problem.layout.pp)
        found["angles of RoPE (fp32)"] = 4 * model.latent.rope * s.seq_len // s.cp * layers
    elif model.position == "rope" and not policy.offload_modules:  # else it is not measured
        each = 4 * model.head_dim * s.seq_len // s.cp
        found["angles of RoPE (fp32)"] = problem.layout.vpp * each  # each chunk has a table
    return found


def _routing(policy: MegatronCore, problem: Problem) -> int:
    """Bytes per token that the dispatchers of a rank's layers keep until their next forward: the
    fp32 probabilities by expert, the map of tokens to experts and, if the module is recomputed, the
    order of tokens, which autograd saves otherwise."""
    model = problem.workload.model
    if model.experts is None:
        return 0
    again = policy.recompute == "full" or (
        policy.recompute == "selective" and "moe" in policy.modules
    )
    tables = (table.activations for table in problem.layer_kinds)
    sent = max(table["permuted"].rows for table in tables if "permuted" in table)
    tokens = shapes(problem.workload, problem.layout, problem.system).shard_tokens
    order = 8 * sent // tokens if again else 0
    return -(-model.expert_layers // problem.layout.pp) * (5 * model.experts.count + order)
