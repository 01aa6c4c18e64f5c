"""Builds the operators of one part of a model: norms, linears, attention, pointwise operators."""

from collections.abc import Callable
from typing import ParamSpec

from msgspec import Struct
from msgspec.structs import replace

from rematbench.costs.operators.kernels import Attention, Gemm, Kernel, Named
from rematbench.costs.operators.ops import (
    Activation,
    Comm,
    CommKind,
    Group,
    Op,
    OpTable,
    Part,
    memory_kernel,
)
from rematbench.inputs.layout import Layout
from rematbench.inputs.shapes import packed_pairs, shapes
from rematbench.inputs.system import System
from rematbench.workload import Model, Workload

P = ParamSpec("P")
CHOSEN = "chosen"
"""The tokens that sparse attention chooses for each query."""
FP32 = 4


def _inside_norm(model: Model) -> tuple[int, int]:
    """Scratch bytes per element of an eager RMSNorm's (forward, backward). Besides inputs, outputs
    and saved tensors, the forward holds one fp32 tensor, the backward three and a half or four.
    Source: traces of LlamaRMSNorm and Gemma2RMSNorm (Transformers 5.23.0) in bf16."""
    return (4, 14) if model.norm_offset else (4, 16)


def _appending(ops: list[Op], make: Callable[P, Op]) -> Callable[P, None]:
    def append(*args: P.args, **kwargs: P.kwargs) -> None:
        ops.append(make(*args, **kwargs))

    return append


class _AttentionComms(Struct, frozen=True, kw_only=True):
    """The collectives around the attention kernels, and the bytes of the gathered input."""

    nbytes: int = 0
    gather: Comm | None = None
    regather: Comm | None = None
    grad_reduce: Comm | None = None


class Builder:
    """Collects the activations and operators of one part, with the sharding of rows and columns."""

    def __init__(
        self, work: Workload, layout: Layout, system: System, fused_attention: bool
    ) -> None:
        self.model: Model = work.model
        self.system = system
        self.fused_attention = fused_attention
        self.ulysses, self.ep, self.expert_tp = layout.ulysses, layout.ep, layout.expert_tp
        self.imbalance, self.capacity_factor = work.imbalance, work.capacity_factor
        self.padded = work.expert_padding == "capacity"
        self.s = shapes(work, layout, system)
        self.e = self.s.element_bytes
        self.ops: list[Op] = []
        self.op = _appending(self.ops, Op)
        self.activations: dict[str, Activation] = {}

    def shard(self, name: str) -> str:
        """Add a tensor of the sequence-parallel region: this rank's tokens, all hidden columns."""
        return self.add(name, self.s.shard_tokens, self.s.hidden * self.e)

    def wide(self, name: str, width: int) -> str:
        """Add a tensor of the tensor-parallel region: all tokens, this rank's columns."""
        return self.add(name, self.s.tokens, width * self.e)

    def add(self, name: str, rows: int, row_bytes: int, differentiable: bool = True) -> str:
        self.activations[name] = Activation(name, rows, row_bytes, differentiable)
        return name

    def nbytes(self, *names: str) -> int:
        return sum(self.activations[name].nbytes for name in names)

    @property
    def wide_bytes(self) -> int:
        """Bytes of an element of statistics and probabilities: those of fp32, or more in fp64."""
        return max(FP32, self.e)

    @property
    def full_bytes(self) -> int:
        """Bytes of a tensor with all tokens of the rank, gathered, and its hidden columns."""
        return self.s.tokens * self.s.hidden * self.e

    def table(self, part: Part) -> OpTable:
        return OpTable(part=part, ops=tuple(self.ops), activations=self.activations)

    def norm(self, name: str, x: str, out: str) -> None:
        """Add the model's norm over a tensor of the sequence-parallel region."""
        parameters = self.model.norm_parameters // self.s.columns
        self._norm(name, x, self.shard(out), 1, parameters)
        if self.s.columns > 1:  # ranks that split a row's columns sum its statistics
            numbers = 1 + (self.model.norm == "layernorm")
            sums = Comm("all_reduce", "columns", numbers * self.s.tokens * self.wide_bytes)
            back = replace(sums, nbytes=2 * sums.nbytes)
            self.ops[-1] = replace(self.ops[-1], reduce=sums, grad_reduce=back)

    def head_norm(self, name: str, x: str, out: str, width: int) -> None:
        """Add a norm over each head of queries or keys (all tokens, this rank's columns), or over
        all their columns, whose statistics tensor-parallel ranks sum."""
        whole = self.model.qk_norm_weights == "width"
        heads = 1 if whole else width // self.model.head_dim
        self._norm(name, x, self.wide(out, width), heads, self.model.head_norm_parameters(width))
        if whole and self.s.tp > 1:
            sums = Comm("all_reduce", "tp", self.s.tokens * FP32)
            self.ops[-1] = replace(self.ops[-1], reduce=sums, grad_reduce=sums)

    def latent_norm(self, name: str, x: str, rank: int, beside: tuple[str, ...] = ()) -> None:
        """Add a norm over the `rank` columns of a low-rank tensor, for this device's shard of
        tokens. `beside`: tensors in the storage of `x`, which stay in memory if `x` does."""
        out = self.add(f"{name}_out", self.s.shard_tokens, rank * self.e)
        self._norm(name, x, out, 1, self.model.norm_parameters_of(rank), beside)

    def _norm(
        self,
        name: str,
        x: str,
        out: str,
        groups: int,
        parameters: int,
        beside: tuple[str, ...] = (),
    ) -> None:
        """Add a norm; each token has `groups` statistics."""
        layernorm = self.model.norm == "layernorm"
        elements = self.nbytes(x) // self.e
        native = layernorm and not self.model.norm_in_fp32
        kernel = Named("norm", "fused" if native else self.system.norm_kernel, elements, self.e)
        eager = self.system.kernels.norm_keeps_steps and (not layernorm or self.model.norm_in_fp32)
        made = self._steps(name, x, groups) if eager else ()
        kept = () if made and self.e < FP32 else (x, *beside)
        inside = _inside_norm(self.model) if eager else (0, 0)
        self.op(
            name=name,
            inputs=(x,),
            outputs=(out, *made),
            saves=(*kept, *made),
            forward=(kernel,),
            backward_input=(kernel,),
            parameters=parameters,
            scratch_forward_bytes=elements * inside[0],
            scratch_backward_bytes=elements * inside[1],
        )

    def _steps(self, name: str, x: str, groups: int) -> tuple[str, ...]:
        """Add the tensors that the eager torch operators of an RMSNorm save: the input in fp32 (for
        the square and the product; not copied if it is already fp32), the reciprocal root, and the
        tensor that the weight scales (for the weight's gradient)."""
        rows, wide = self.activations[x].rows, max(FP32, self.e)
        elements = self.activations[x].row_bytes // self.e
        model = self.model
        in_wide = model.norm_offset or model.norm_in_fp32
        scaled = elements * (wide if in_wide else self.e) * model.norm_weight
        scaled *= 2 if model.norm == "layernorm" else 1  # LayerNorm also saves x - mean
        sizes = {"wide": elements * wide} if self.e < FP32 else {}
        sizes |= {"root": groups * wide} | ({"scaled": scaled} if scaled else {})
        return tuple(self.add(f"{name}_{step}", rows, size, False) for step, size in sizes.items())

    def column(
        self,
        name: str,
        x: str,
        outs: dict[str, int],
        extra: tuple[Kernel, ...] = (),
        *,
        bias: bool = False,
        width: int = 0,
    ) -> None:
        """Add a column-parallel linear of `width` input columns (0: the hidden columns): it gathers
        its input, or all-reduces its input's gradient. Ranks that split its input columns
        all-reduce its output (Singh et al., arXiv 2305.13525)."""
        for out, each in outs.items():
            self.wide(out, each)
        columns = sum(outs.values())
        n, h = self.s.tokens, width or self.s.hidden
        split, nbytes = self.s.tp > 1, n * h * self.e
        gather = Comm("all_gather", "tp", nbytes) if self.s.sp else None
        back: CommKind = "reduce_scatter" if self.s.sp else "all_reduce"
        self.op(
            name=name,
            inputs=(x,),
            outputs=tuple(outs),
            saves=(x,),
            forward=(Gemm(n, columns, h), *extra),
            backward_input=(*extra, Gemm(n, h, columns)),
            backward_weight=(Gemm(h, columns, n),),
            gather=gather,
            regather=gather,
            reduce=self._over_columns(*outs),
            grad_reduce=Comm(back, "tp", nbytes) if split else None,
            gathered_bytes=nbytes if gather else 0,
            parameters=h * columns + (columns if bias else 0),
        )

    def _over_columns(self, *names: str) -> Comm | None:
        """The sum of partial products over the ranks that split a matrix's other dimension."""
        return Comm("all_reduce", "columns", self.nbytes(*names)) if self.s.columns > 1 else None

    def row(self, name: str, x: str, out: str, width: int, *, bias: bool) -> None:
        """Add a row-parallel linear: it reduces its output and gathers its output's gradient.
        Ranks that split its output columns all-reduce its input gradient."""
        self.shard(out)
        n, h = self.s.tokens, self.s.hidden
        forward: CommKind = "reduce_scatter" if self.s.sp else "all_reduce"
        split = self.s.tp > 1
        self.op(
            name=name,
            inputs=(x,),
            outputs=(out,),
            saves=(x,),
            forward=(Gemm(n, h, width),),
            backward_input=(Gemm(n, width, h),),
            backward_weight=(Gemm(width, h, n),),
            reduce=Comm(forward, "tp", self.full_bytes) if split else None,
            grad_gather=Comm("all_gather", "tp", self.full_bytes) if self.s.sp else None,
            grad_reduce=self._over_columns(x),
            unreduced_bytes=self.full_bytes if self.s.sp else 0,
            parameters=width * h + (h if bias else 0),
        )

    def residual(self, name: str, x: str, skip: str, out: str) -> None:
        """Add x (after dropout, if any) + skip."""
        self.shard(out)
        nbytes = self.nbytes(out)
        mask: tuple[str, ...] = ()
        if self.model.dropout > 0:
            mask = (self.add(f"{out}_mask", self.s.shard_tokens, self.s.hidden, False),)
        self.op(
            name=name,
            inputs=(x, skip),
            outputs=(out, *mask),
            saves=mask,
            forward=memory_kernel(3 * nbytes, self.nbytes(*mask)),
            backward_input=memory_kernel(2 * nbytes, self.nbytes(*mask)) if mask else (),
            alias_inputs=(skip,) if mask else (x, skip),
        )

    def pointwise(
        self,
        name: str,
        inputs: tuple[str, ...],
        out: str,
        saves: tuple[str, ...],
        *,
        parameters: int = 0,
    ) -> None:
        """Add an activation function or a product over the tensor-parallel region. An activation
        function of eager operators also saves its steps, which are one tensor here."""
        ffn_bytes = self.s.ffn * self.e
        self.add(out, self.s.tokens, ffn_bytes)
        one = self.nbytes(out)
        eager = name == "act" and self.system.kernels.eager_operators
        count = self.model.activation_steps if eager else 0
        made = int(count * ffn_bytes)
        steps = (self.add("act_steps", self.s.tokens, made, False),) if made else ()
        self.op(
            name=name,
            inputs=inputs,
            outputs=(out, *steps),
            saves=(*saves, *steps),
            forward=memory_kernel((len(inputs) + 1) * one, 2 * self.nbytes(*steps)),
            backward_input=memory_kernel(
                (len(saves) + 1 + len(inputs)) * one, 2 * self.nbytes(*steps)
            ),
            parameters=parameters,
        )

    def projected(self, name: str) -> str:
        """The name of a projection's output. The inputs of attention are q, k and v, so under
        Ulysses the projections' outputs, which are in row order, have other names."""
        return f"{name}_rows" if self.ulysses > 1 else name

    def attention(self, window: int) -> None:
        """Add the attention kernel, between two all-to-alls under Ulysses (arXiv 2309.14509), also
        inside context parallelism (arXiv 2405.07719; Megatron-core's a2a+p2p), where the kernel
        processes its slice of the sequence with a part of the heads.

        Under Ulysses the qkv and output projections process the rank's part of the sequence with
        all heads (row order). The kernel processes whole sequences with a part of the heads (head
        order). Its backward reads q, k, v and its output in head order, and the weight gradient of
        the output projection reads the output in row order, so the output is saved in both orders.
        q, k and v in row order are not saved, because RoPE's backward reads only angles.
        """
        out = "attn_heads" if self.ulysses > 1 else "attn_out"
        if self.ulysses > 1:
            kv_heads = max(self.s.kv_heads, self.ulysses)  # several ranks may get the same head
            model = self.model
            widths = {"q": self.s.q_width, "k": kv_heads * model.head_dim}
            widths["v"] = kv_heads * model.v_dim
            self._exchange("to_heads", {self.projected(name): name for name in widths}, widths)
        self._attention(window, self.wide(out, self.s.out_width))
        if self.ulysses > 1:
            self._exchange("to_rows", {out: "attn_out"}, {"attn_out": self.s.out_width})

    def _exchange(self, name: str, pairs: dict[str, str], widths: dict[str, int]) -> None:
        """Add an all-to-all between row order and head order; the backward moves the same bytes."""
        for out, width in widths.items():
            self.wide(out, width)
        group: Group = "ulysses" if self.s.cp > 1 else "cp"
        comm = Comm("all_to_all", group, self.nbytes(*widths))
        self.op(
            name=name,
            inputs=tuple(pairs),
            outputs=tuple(pairs.values()),
            reduce=comm,
            grad_gather=comm,
        )

    def _attention(self, window: int, out: str) -> None:
        fused = self.fused_attention
        s = self.s
        length = s.document_len
        if self.model.attention_chunked and window:
            length, window = min(window, length), 0
        pairs = packed_pairs(s.seq_len, length, window) // s.cp
        if self.model.attends_all:
            whole, rest = divmod(s.seq_len, length)
            pairs = (whole * length**2 + rest**2) // s.cp
        if not fused:
            pairs = s.seq_len * s.seq_len // s.cp
        kernel = Attention(
            batch=s.micro_batch,
            heads=s.heads // self.ulysses,
            kv_heads=max(1, s.kv_heads // self.ulysses),
            head_dim=self.model.head_dim,
            v_dim=self.model.latent.v if self.model.latent else 0,
            q_rows=s.seq_len // s.cp,
            kv_rows=s.seq_len,
            pairs=pairs,
            fused=fused,
            documents=s.documents if fused else 1,
        )
        lse_bytes = s.heads * self.wide_bytes
        internals = (self.add("lse", s.tokens, lse_bytes, False),) if fused else self._scores()
        inside = (0, self._inside_fused()) if fused else self._inside_scores()
        repeated = self._repeated()
        chosen = tuple(name for name in (CHOSEN,) if name in self.activations)
        beside = (*chosen, *self._with_values())
        comms, merged = self._attention_comms(), self._merged()
        self.op(
            name="attention",
            inputs=("q", "k", "v", *chosen),
            outputs=(out, *internals, *repeated),
            saves=(
                *("q", *(repeated or ("k", "v")), *beside, *internals),
                *((out,) if fused else ()),
            ),
            forward=(kernel,),
            backward_input=(kernel,),
            row_local=False,
            gathered_bytes=comms.nbytes,
            gather=comms.gather,
            regather=comms.regather,
            grad_reduce=comms.grad_reduce,
            scratch_forward_bytes=inside[0] + merged[0],
            scratch_backward_bytes=inside[1] + merged[1],
            parameters=s.heads * self.model.attention_sinks,
        )

    def _with_values(self) -> tuple[str, ...]:
        """The columns of keys that stay in memory with the saved values of latent attention,
        because these are a view of the up-projection's output (stacks with fused linears copy
        them). Source: traces of MiniCPM3 and Youtu (Transformers 5.23.0)."""
        views = self.model.latent is not None and not self.system.kernels.fused_linears
        return ("k_nope",) if views and self.ulysses == 1 else ()

    def _merged(self) -> tuple[int, int]:
        """(forward, backward): scratch bytes of merging attention over ranks in fp32. Source: torch
        2.13, distributed/tensor/experimental/_context_parallel/_attention.py. _merge_one holds four
        tensors as large as the output. _templated_ring_attention_backward holds a sum of dQ, and
        for dK and dV the received sum, the updated sum and the sent sum. Both copy the keys and
        values that they send. The kernel's fp32 sum of dQ is counted here, unless `_inside_fused`
        counts it."""
        if self.s.cp == 1 or not self.system.parallel.cp_merges:
            return 0, 0
        q, kv = (FP32 * self.nbytes(*names) // self.e for names in (("q",), ("k", "v")))
        sent = self.nbytes("k", "v")
        alone = not self.system.kernels.wide_query_gradient
        return 4 * q + sent, q + alone * q + 3 * kv + sent

    def _attention_comms(self) -> "_AttentionComms":
        """The collectives of attention under context parallelism. allgather: keys and values of all
        cp ranks are gathered, and their gradients reduce-scattered (ATC'24). ring: they are
        exchanged during the kernels, in the backward with their gradients (Ring Attention, arXiv
        2310.01889)."""
        kv = self.nbytes("k", "v")
        cp = self.s.cp
        if cp > 1 and self.system.parallel.cp_kind == "ring":
            ring, back = Comm("ring", "cp", kv * cp), Comm("ring", "cp", 2 * kv * cp)
            return _AttentionComms(nbytes=2 * kv, gather=ring, regather=back)
        if cp > 1:
            spread = Comm("all_gather", "cp", kv * cp)
            back = Comm("reduce_scatter", "cp", kv * cp)
            return _AttentionComms(nbytes=kv * cp, gather=spread, regather=spread, grad_reduce=back)
        return _AttentionComms()

    def _repeated(self) -> tuple[str, ...]:
        """Add keys and values that are repeated for each query head, if the stack's attention reads
        them."""
        kernels = self.system.kernels
        repeats = kernels.repeats_kv if self.fused_attention else kernels.eager_operators
        if not repeats or self.s.kv_heads == self.s.heads:
            return ()
        names = ("k_repeated", "v_repeated")
        return tuple(self.add(n, self.s.tokens, self.s.q_width * self.e, False) for n in names)

    def _scores(self) -> tuple[str, ...]:
        """Add the stored probabilities; with dropout also a byte mask and the probabilities after
        it. Eager operators also save the softmax in fp32, and the tanh of a soft cap."""
        row = self.s.heads * self.s.seq_len
        names = [self.add("attn_probs", self.s.tokens, row * self.e, False)]
        if self.system.kernels.eager_operators and self.e < 4:
            names.append(self.add("attn_softmax", self.s.tokens, row * 4, False))
        if self.system.kernels.eager_operators and self.model.attention_soft_cap:
            names.append(self.add("attn_capped", self.s.tokens, row * self.e, False))
        if self.model.drops_attention:
            names.append(self.add("attn_probs_mask", self.s.tokens, row, False))
            names.append(self.add("attn_probs_dropped", self.s.tokens, row * self.e, False))
        return tuple(names)

    def _inside_fused(self) -> int:
        """Scratch bytes of the backward of fused attention.  Source: flash-attention,
        csrc/flash_attn/flash_api.cpp, mha_bwd (dq_accum, dk_expanded, dv_expanded)."""
        if not self.system.kernels.wide_query_gradient:
            return 0
        grouped = 2 * self.e if self.s.kv_heads < self.s.heads else 0
        return self.s.tokens * self.s.q_width * (FP32 + grouped)

    def _inside_scores(self) -> tuple[int, int]:
        """(forward, backward): scratch bytes of eager attention's softmax (0 if one kernel computes
        it). Forward: the masked scores and their fp32 copy, minus the copy of the softmax, which
        does not exist yet. Backward: the gradients of the softmax and of the scores in fp32, minus
        the saved copy and the values, which are free, and minus the gradients of q and k, which do
        not exist yet (the values' gradient has as many heads as q). Source: traces of
        eager_attention_forward (Transformers 5.23.0)."""
        if not self.system.kernels.eager_operators:
            return 0, 0
        s, wide = self.s, max(FP32, self.e)
        scores = s.tokens * s.heads * s.seq_len
        copy = self.e if self.e < FP32 else 0
        absent = 2 * (s.q_width + s.kv_width) * s.tokens * self.e
        return scores * wide, max(0, scores * (2 * wide - copy) - absent)
