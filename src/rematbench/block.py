"""Build the operator tables of a model on one rank: embedding, decoder layer, head with loss."""

from msgspec import Struct

from rematbench.cost.kernels import Attention, Elementwise, Gemm, Kernel
from rematbench.layout import Layout
from rematbench.ops import Activation, Comm, CommKind, Op, OpTable, Part, moved
from rematbench.system import System
from rematbench.workload import Model, Workload


class Shapes(Struct, frozen=True, kw_only=True):
    """The sizes of one rank: tokens, shards and element bytes, derived once."""

    tokens: int
    shard_tokens: int
    tp: int
    cp: int
    sp: bool
    micro_batch: int
    seq_len: int
    element_bytes: int
    q_width: int
    kv_width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int


def shapes(work: Workload, layout: Layout, system: System) -> Shapes:
    """Per-rank sizes; KV heads are replicated when tp exceeds them."""
    model, tp = work.model, layout.tp
    tokens = layout.micro_batch * work.seq_len // (layout.cp * layout.ulysses)
    sequence_parallel = layout.sp and tp > 1
    kv_heads = max(1, model.num_kv_heads // tp)
    return Shapes(
        tokens=tokens,
        shard_tokens=tokens // tp if sequence_parallel else tokens,
        tp=tp,
        cp=layout.cp,
        sp=sequence_parallel,
        micro_batch=layout.micro_batch,
        seq_len=work.seq_len,
        element_bytes=work.element_bytes,
        q_width=model.num_heads // tp * model.head_dim,
        kv_width=kv_heads * model.head_dim,
        heads=model.num_heads // tp,
        kv_heads=kv_heads,
        ffn=model.ffn // tp,
        vocab=system.padded_vocab(model.vocab, tp) // tp,
    )


def causal_pairs(seq_len: int, window: int) -> int:
    """(query, key) pairs of one sequence and head under causality and a window (0: none)."""
    if window == 0 or window >= seq_len:
        return seq_len * (seq_len + 1) // 2
    return window * (window + 1) // 2 + (seq_len - window) * window


class _AttentionComms(Struct, frozen=True, kw_only=True):
    """Collectives around the attention kernels, and the bytes of the gathered input."""

    nbytes: int = 0
    gather: Comm | None = None
    regather: Comm | None = None
    reduce: Comm | None = None
    grad_reduce: Comm | None = None


class _Builder:
    """Collects activations and ops of one part; knows the sharding of rows and columns."""

    def __init__(
        self, work: Workload, layout: Layout, system: System, fused_attention: bool
    ) -> None:
        self.model: Model = work.model
        self.system = system
        self.fused_attention = fused_attention
        self.ulysses = layout.ulysses
        self.s = shapes(work, layout, system)
        self.e = self.s.element_bytes
        self.ops: list[Op] = []
        self.activations: dict[str, Activation] = {}

    def shard(self, name: str) -> str:
        """A hidden-wide tensor of the sequence-parallel region."""
        return self.add(name, self.s.shard_tokens, self.model.hidden * self.e)

    def wide(self, name: str, width: int) -> str:
        """A tensor of the tensor-parallel region: all tokens, this rank's columns."""
        return self.add(name, self.s.tokens, width * self.e)

    def add(self, name: str, rows: int, row_bytes: int, differentiable: bool = True) -> str:
        self.activations[name] = Activation(name, rows, row_bytes, differentiable)
        return name

    def nbytes(self, *names: str) -> int:
        return sum(self.activations[name].nbytes for name in names)

    @property
    def full_bytes(self) -> int:
        """The hidden-wide tensor of all the rank's tokens (after a gather)."""
        return self.s.tokens * self.model.hidden * self.e

    def table(self, part: Part) -> OpTable:
        return OpTable(part=part, ops=tuple(self.ops), activations=self.activations)

    def norm(self, name: str, x: str, out: str) -> None:
        """Fused: x read, out written; backward x, dout, dx.  Eager RMSNorm in fp32 (float, pow,
        mean, rsqrt, two products, cast): 36 bytes an element, backward 56."""
        self.shard(out)
        fused = self.system.fused_norm or self.system.compiled or self.model.norm == "layernorm"
        nbytes = self.nbytes(x)
        self.ops.append(
            Op(
                name=name,
                inputs=(x,),
                outputs=(out,),
                saves=(x,),
                forward=moved(2 * nbytes) if fused else moved(18 * nbytes, launches=7),
                backward_input=moved(3 * nbytes, launches=2)
                if fused
                else moved(28 * nbytes, launches=12),
                parameters=self.model.norm_parameters,
            )
        )

    def column(
        self,
        name: str,
        x: str,
        outs: dict[str, int],
        extra: tuple[Kernel, ...] = (),
        *,
        bias: bool = False,
    ) -> None:
        """A column-parallel linear: gathers its sequence shard (or all-reduces its gradient)."""
        for out, width in outs.items():
            self.wide(out, width)
        columns = sum(outs.values())
        n, h = self.s.tokens, self.model.hidden
        split = self.s.tp > 1
        gather = Comm("all_gather", "tp", self.full_bytes) if self.s.sp else None
        back: CommKind = "reduce_scatter" if self.s.sp else "all_reduce"
        self.ops.append(
            Op(
                name=name,
                inputs=(x,),
                outputs=tuple(outs),
                saves=(x,),
                forward=(Gemm(n, columns, h), *extra),
                backward_input=(*extra, Gemm(n, h, columns)),
                backward_weight=(Gemm(h, columns, n),),
                gather=gather,
                regather=gather,
                grad_reduce=Comm(back, "tp", self.full_bytes) if split else None,
                gathered_bytes=self.full_bytes if gather else 0,
                parameters=h * columns + (columns if bias else 0),
            )
        )

    def row(self, name: str, x: str, out: str, width: int, *, bias: bool) -> None:
        """A row-parallel linear: reduces its output, gathers its output's gradient."""
        self.shard(out)
        n, h = self.s.tokens, self.model.hidden
        forward: CommKind = "reduce_scatter" if self.s.sp else "all_reduce"
        split = self.s.tp > 1
        self.ops.append(
            Op(
                name=name,
                inputs=(x,),
                outputs=(out,),
                saves=(x,),
                forward=(Gemm(n, h, width),),
                backward_input=(Gemm(n, width, h),),
                backward_weight=(Gemm(width, h, n),),
                reduce=Comm(forward, "tp", self.full_bytes) if split else None,
                grad_gather=Comm("all_gather", "tp", self.full_bytes) if self.s.sp else None,
                unreduced_bytes=self.full_bytes if self.s.sp else 0,
                parameters=width * h + (h if bias else 0),
            )
        )

    def residual(self, name: str, x: str, skip: str, out: str) -> None:
        """x (after dropout, if any) + skip."""
        self.shard(out)
        nbytes = self.nbytes(out)
        mask: tuple[str, ...] = ()
        if self.model.dropout > 0:
            mask = (self.add(f"{out}_mask", self.s.shard_tokens, self.model.hidden, False),)
        self.ops.append(
            Op(
                name=name,
                inputs=(x, skip),
                outputs=(out, *mask),
                saves=mask,
                forward=moved(3 * nbytes, self.nbytes(*mask)),
                backward_input=moved(2 * nbytes, self.nbytes(*mask)) if mask else (),
                alias_inputs=(skip,) if mask else (x, skip),
            )
        )

    def pointwise(
        self, name: str, inputs: tuple[str, ...], out: str, saves: tuple[str, ...]
    ) -> None:
        """An activation function or a product over the tensor-parallel region."""
        ffn_bytes = self.s.ffn * self.e
        self.add(out, self.s.tokens, ffn_bytes)
        one = self.nbytes(out)
        self.ops.append(
            Op(
                name=name,
                inputs=inputs,
                outputs=(out,),
                saves=saves,
                forward=moved((len(inputs) + 1) * one),
                backward_input=moved((len(saves) + 1 + len(inputs)) * one),
            )
        )

    def attention(self, window: int) -> None:
        fused = self.fused_attention
        self.wide("attn_out", self.s.q_width)
        s = self.s
        pairs = causal_pairs(s.seq_len, window) // s.cp
        if not fused:
            pairs = s.seq_len * s.seq_len // s.cp
        kernel = Attention(
            batch=s.micro_batch,
            heads=s.heads // self.ulysses,
            kv_heads=max(1, s.kv_heads // self.ulysses),
            head_dim=self.model.head_dim,
            q_rows=s.seq_len // s.cp,
            kv_rows=s.seq_len,
            pairs=pairs,
            fused=fused,
        )
        internals = (self._lse(),) if fused else self._scores()
        comms = self._attention_comms()
        self.ops.append(
            Op(
                name="attention",
                inputs=("q", "k", "v"),
                outputs=("attn_out", *internals),
                saves=("q", "k", "v", *internals, *(("attn_out",) if fused else ())),
                forward=(kernel,),
                backward_input=(kernel,),
                row_local=False,
                gathered_bytes=comms.nbytes,
                gather=comms.gather,
                regather=comms.regather,
                reduce=comms.reduce,
                grad_gather=comms.reduce,
                grad_reduce=comms.grad_reduce,
            )
        )

    def _attention_comms(self) -> "_AttentionComms":
        """Collectives of attention under context parallelism or Ulysses.

        allgather: KV of all cp ranks, dKV reduce-scattered (ATC'24); ring: KV passed on beside the
        kernels, KV and dKV in the backward (Ring Attention, arXiv 2310.01889); ulysses: q, k, v to
        head shards and the output back (arXiv 2309.14509); it saves the exchanged tensors.
        """
        kv, qkv = self.nbytes("k", "v"), self.nbytes("q", "k", "v")
        cp = self.s.cp
        if cp > 1 and self.system.cp_kind == "ring":
            ring, back = Comm("ring", "cp", kv * cp), Comm("ring", "cp", 2 * kv * cp)
            return _AttentionComms(nbytes=2 * kv, gather=ring, regather=back)
        if cp > 1:
            spread = Comm("all_gather", "cp", kv * cp)
            back = Comm("reduce_scatter", "cp", kv * cp)
            return _AttentionComms(nbytes=kv * cp, gather=spread, regather=spread, grad_reduce=back)
        if self.ulysses > 1:
            into, out = Comm("all_to_all", "cp", qkv), Comm("all_to_all", "cp", self.nbytes("q"))
            return _AttentionComms(nbytes=qkv, gather=into, reduce=out, grad_reduce=into)
        return _AttentionComms()

    def _lse(self) -> str:
        return self.add("lse", self.s.tokens, self.s.heads * max(4, self.e), False)

    def _scores(self) -> tuple[str, ...]:
        """Materialised probabilities; with dropout a byte mask and the dropped probabilities."""
        row = self.s.heads * self.s.seq_len
        names = [self.add("attn_probs", self.s.tokens, row * self.e, False)]
        if self.model.dropout > 0:
            names.append(self.add("attn_probs_mask", self.s.tokens, row, False))
            names.append(self.add("attn_probs_dropped", self.s.tokens, row * self.e, False))
        return tuple(names)


def embedding_table(work: Workload, layout: Layout, system: System) -> OpTable:
    """Token (and learned position) lookup; the output is the first layer's input."""
    b = _Builder(work, layout, system, True)
    out = b.shard("layer_input")
    nbytes = b.nbytes(out)
    mask: tuple[str, ...] = ()
    if work.model.dropout > 0:
        mask = (b.add("embedding_mask", b.s.shard_tokens, work.model.hidden, False),)
    positions = work.model.max_positions if work.model.position == "learned" else 0
    reduced = Comm("reduce_scatter" if b.s.sp else "all_reduce", "tp", b.full_bytes)
    b.ops.append(
        Op(
            name="embedding",
            inputs=(),
            outputs=(out, *mask),
            saves=mask,
            forward=(Elementwise(2 * b.full_bytes, 2),),
            backward_weight=(Elementwise(3 * b.full_bytes, 2),),
            reduce=reduced if b.s.tp > 1 else None,
            grad_gather=Comm("all_gather", "tp", b.full_bytes) if b.s.sp else None,
            unreduced_bytes=b.full_bytes if b.s.sp else 0,
            parameters=(b.s.vocab + positions) * work.model.hidden,
        )
    )
    assert nbytes > 0
    return b.table("embedding")


def layer_table(
    work: Workload, layout: Layout, system: System, *, fused_attention: bool, window: int
) -> OpTable:
    """One pre-norm decoder layer (Llama or GPT), from `layer_input` to `layer_output`."""
    b = _Builder(work, layout, system, fused_attention)
    model, s = work.model, b.s
    b.shard("layer_input")
    b.norm("attn_norm", "layer_input", "attn_norm_out")
    rope: tuple[Kernel, ...] = ()
    if model.position == "rope":
        fused = system.fused_rope or system.compiled  # eager: cast, rotate, two products, add
        turned = s.tokens * (s.q_width + s.kv_width) * b.e
        rope = moved(2 * turned, launches=2) if fused else moved(10 * turned, launches=8)
    widths = {"q": s.q_width, "k": s.kv_width, "v": s.kv_width}
    b.column("qkv", "attn_norm_out", widths, rope, bias=model.qkv_bias)
    b.attention(window)
    b.row("proj", "attn_out", "proj_out", s.q_width, bias=model.proj_bias)
    mixed = _post_norm(b, "post_attn_norm", "proj_out")
    b.residual("attn_add", mixed, "layer_input", "attn_residual")
    b.norm("mlp_norm", "attn_residual", "mlp_norm_out")
    _mlp(b)
    mixed = _post_norm(b, "post_mlp_norm", "fc2_out")
    b.residual("mlp_add", mixed, "attn_residual", "layer_output")
    return b.table("layer")


def _post_norm(b: _Builder, name: str, x: str) -> str:
    if not b.model.post_norm:
        return x
    b.norm(name, x, f"{name}_out")
    return f"{name}_out"


def _mlp(b: _Builder) -> None:
    ffn = b.s.ffn
    if not b.model.gated:
        b.column("fc1", "mlp_norm_out", {"up_out": ffn}, bias=b.model.mlp_bias)
        b.pointwise("act", ("up_out",), "fc2_in", ("up_out",))
    else:
        b.column("fc1", "mlp_norm_out", {"gate_out": ffn, "up_out": ffn}, bias=b.model.mlp_bias)
        if b.system.fused_swiglu:
            b.pointwise("act", ("gate_out", "up_out"), "fc2_in", ("gate_out", "up_out"))
        else:
            b.pointwise("act", ("gate_out",), "act_out", ("gate_out",))
            b.pointwise("mul", ("act_out", "up_out"), "fc2_in", ("act_out", "up_out"))
    b.row("fc2", "fc2_in", "fc2_out", ffn, bias=b.model.mlp_bias)


def head_table(work: Workload, layout: Layout, system: System) -> OpTable:
    """Final norm, output projection over a vocabulary shard, cross-entropy."""
    b = _Builder(work, layout, system, True)
    s, e = b.s, b.e
    b.shard("layer_output")
    b.norm("final_norm", "layer_output", "final_norm_out")
    b.column("lm_head", "final_norm_out", {"logits": s.vocab})
    logits_bytes = b.nbytes("logits")
    wide = max(4, e) if system.logits_fp32 else e
    saved = b.add("loss_saved", s.tokens, s.vocab * wide, False)
    statistics = Comm("all_reduce", "tp", 3 * s.tokens * max(4, e)) if s.tp > 1 else None
    passes = 1 if system.fused_loss else 4
    scratch = _loss_scratch(system, logits_bytes, s.tokens * s.vocab * wide)
    b.ops.append(
        Op(
            name="loss",
            inputs=("logits",),
            outputs=(saved,),
            saves=(saved,),
            forward=(
                Elementwise(logits_bytes + (passes + 1) * s.tokens * s.vocab * wide, passes + 2),
            ),
            backward_input=(Elementwise(2 * s.tokens * s.vocab * wide + logits_bytes, 2),),
            reduce=statistics,
            scratch_forward_bytes=scratch[0],
            scratch_backward_bytes=scratch[1],
        )
    )
    return b.table("head")


def _loss_scratch(system: System, logits_bytes: int, wide_bytes: int) -> tuple[int, int]:
    """Bytes inside an unfused loss beside its logits, its saved softmax and the logits' gradient.

    Forward: the fp32 copy of the logits (Megatron keeps the logits themselves meanwhile;
    F.cross_entropy of `model(x).float()` does not).  Backward, unless in place: the gradients of
    the log-probabilities and of the fp32 logits, before those of the logits exist.
    """
    if system.fused_loss:
        return 0, 0
    copy = wide_bytes if system.logits_fp32 else 0
    if system.loss_in_place:
        return copy, 0
    return max(0, copy - logits_bytes), 2 * wide_bytes - logits_bytes
