"""The operator tables of a model on one rank: embedding, decoder layer, head with loss."""

from typing import NamedTuple

from msgspec.structs import replace

from rematbench.costs.operators.adapters import Place
from rematbench.costs.operators.builder import Builder
from rematbench.costs.operators.experts import add_experts
from rematbench.costs.operators.kernels import Elementwise, Kernel, Named
from rematbench.costs.operators.latent import add_latent
from rematbench.costs.operators.memory import add_memory
from rematbench.costs.operators.ops import Comm, Op, OpTable, memory_kernel, with_saved
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import System
from rematbench.workload import Experts, Workload


class LayerKind(NamedTuple):
    """A kind of layer: its attention window, whether it has one MLP (not experts), which weights
    train (`Place`), whether it predicts one more token, whether its linears are quantised, whether
    it shares the weights of an earlier layer, and whether it owns or borrows a memory table."""

    window: int
    dense: bool
    place: Place
    predicts: bool
    quantised: bool = False
    borrows: bool = False
    memory: str = ""


def embedding_table(work: Workload, layout: Layout, system: System) -> OpTable:
    """The embedding: a lookup of tokens (and learned positions) for the first layer's input."""
    b = Builder(work, layout, system, True)
    if work.model.embedding_width:
        return _narrow_embedding(b)
    normed = work.model.embedding_norm
    out = b.shard("embedding_out" if normed else "layer_input")
    mask: tuple[str, ...] = ()
    if work.model.drops_embedding:
        mask = (b.add("embedding_mask", b.s.shard_tokens, b.s.hidden, False),)
    positions = work.model.max_positions if work.model.position == "learned" else 0
    _lookup(b, "embedding", (out, *mask), (b.s.vocab + positions) * b.s.hidden)
    if normed:
        b.norm("embedding_norm", out, "layer_input")
    return b.table("embedding")


def _narrow_embedding(b: Builder) -> OpTable:
    """A narrow embedding, its norm, and the linear that widens it to the hidden columns. Source:
    Transformers 5.23.0, models/albert/modeling_albert.py (AlbertEmbeddings,
    embedding_hidden_mapping_in)."""
    narrow, model = b.model.narrow, b.model
    x = b.add("embedding_narrow", b.s.shard_tokens, narrow * b.e)
    moved = b.nbytes(x)
    b.op(
        name="embedding",
        inputs=(),
        outputs=(x,),
        forward=(Elementwise(2 * moved, 2),),
        backward_weight=(Elementwise(3 * moved, 2),),
        parameters=(b.s.vocab + model.max_positions) * narrow,
    )
    b.latent_norm("embedding_norm", x, narrow)
    b.column(
        "embedding_widen", "embedding_norm_out", {"layer_input": model.hidden}, bias=True,
        width=narrow,
    )  # fmt: skip
    return b.table("embedding")


def _narrow_head(b: Builder) -> str:
    """Add the linear, the activation and the norm that narrow the decoder's output for the output
    projection (AlbertMLMHead); return the name of the output."""
    narrow = b.model.narrow
    b.shard("layer_output")
    b.column("head_narrow", "layer_output", {"head_narrow": narrow}, bias=True)
    moved = memory_kernel(2 * b.nbytes("head_narrow"))
    out = b.add("head_act_out", b.s.shard_tokens, narrow * b.e)
    b.op(
        name="head_act",
        inputs=("head_narrow",),
        outputs=(out,),
        saves=("head_narrow",),
        forward=moved,
        backward_input=moved,
    )
    b.latent_norm("head_norm", out, narrow)
    return "head_norm_out"


def _lookup(b: Builder, name: str, outputs: tuple[str, ...], parameters: int) -> None:
    """Add the lookup of embeddings; it saves every output except the first."""
    reduced = Comm("reduce_scatter" if b.s.sp else "all_reduce", "tp", b.full_bytes)
    b.op(
        name=name,
        inputs=(),
        outputs=outputs,
        saves=outputs[1:],
        forward=(Elementwise(2 * b.full_bytes, 2),),
        backward_weight=(Elementwise(3 * b.full_bytes, 2),),
        reduce=reduced if b.s.tp > 1 else None,
        grad_gather=Comm("all_gather", "tp", b.full_bytes) if b.s.sp else None,
        unreduced_bytes=b.full_bytes if b.s.sp else 0,
        parameters=parameters,
    )


def layer_table(
    work: Workload,
    layout: Layout,
    system: System,
    *,
    fused_attention: bool,
    window: int,
    dense: bool = True,
    memory: str = "",
) -> OpTable:
    """One decoder layer, from `layer_input` to `layer_output`. `dense`: it has one MLP instead of
    the model's experts; `memory`: whether it owns or borrows the table that it reads instead of an
    MLP.

    A parallel block has its norms first and its residual additions last. So the backward of both
    branches reads the output's gradient before anything is added to the input's gradient.
    """
    b = Builder(work, layout, system, fused_attention)
    b.shard("layer_input")
    if b.model.block == "sequential":
        experts = None if dense else b.model.experts
        _sequential(b, layout, experts, window, ("layer_input", "layer_output"), memory)
        return b.table("layer")
    before, after = b.model.pre_norm, b.model.post_norm
    mixed = _norm(b, "attn_norm", "layer_input", before)
    shared = b.model.block == "parallel_shared_norm"
    second = mixed if shared else _norm(b, "mlp_norm", "layer_input", before)
    _attention(b, mixed, window)
    attended = _norm(b, "post_attn_norm", "proj_out", after)
    _mlp(b, second)
    b.residual("attn_add", attended, "layer_input", "attn_residual")
    added = _norm(b, "post_mlp_norm", "fc2_out", after)
    b.residual("mlp_add", added, "attn_residual", "layer_output")
    return b.table("layer")


def _sequential(
    b: Builder,
    layout: Layout,
    experts: Experts | None,
    window: int,
    ends: tuple[str, str],
    memory: str = "",
) -> None:
    """Add attention, then an MLP, experts or memory, between two tensors of the residual stream."""
    (x, out), before, after = ends, b.model.pre_norm, b.model.post_norm
    _attention(b, _norm(b, "attn_norm", x, before), window)
    attended = _norm(b, "post_attn_norm", "proj_out", after)
    b.residual("attn_add", attended, x, "attn_residual")
    mixed = _norm(b, "mlp_norm", "attn_residual", before)
    if memory and b.model.memory is not None:
        add_memory(b, b.model.memory, mixed, "fc2_out", owns=memory == "owns")
    elif experts is None:
        _mlp(b, mixed)
    else:
        add_experts(b, layout, experts, mixed, "fc2_out")
    b.residual("mlp_add", _norm(b, "post_mlp_norm", "fc2_out", after), "attn_residual", out)


def prediction_table(
    work: Workload,
    layout: Layout,
    system: System,
    *,
    fused_attention: bool,
    dense: bool,
    copies: bool,
) -> OpTable:
    """The layer that predicts one more token, from `layer_input`, the decoder's output, to
    `layer_output`, which has the hidden columns of the decoder and then those of the prediction,
    for the head. `copies`: the layer's rank has a copy of the embedding.

    Source: megatron-core 0.16.1, multi_token_prediction.py (MultiTokenPredictionLayer). Deviation:
    the final norm is here, even if another stage has the decoder's last layer.
    """
    b = Builder(work, layout, system, fused_attention)
    hidden = work.model.hidden
    b.shard("layer_input")
    b.norm("final_norm", "layer_input", "final_norm_out")
    _lookup(b, "next_embedding", (b.shard("next_embedding"),), b.s.vocab * hidden * copies)
    b.norm("next_norm", "next_embedding", "next_norm_out")
    b.norm("hidden_norm", "final_norm_out", "hidden_norm_out")
    _beside(b, "join_cat", ("next_norm_out", "hidden_norm_out"), "joined")
    if b.s.tp == 1:
        b.column("join", "joined", {"join_out": hidden}, width=2 * hidden)
    else:
        b.column("join", "joined", {"join_columns": hidden // b.s.tp}, width=2 * hidden)
        whole = Comm("all_gather", "tp", b.full_bytes)
        b.op(
            name="join_gather",
            inputs=("join_columns",),
            outputs=(b.shard("join_out"),),
            forward=(Elementwise(b.full_bytes // b.s.tp + b.nbytes("join_out")),),
            backward_input=(Elementwise(b.full_bytes // b.s.tp + b.nbytes("join_out")),),
            gather=whole,
            gathered_bytes=b.full_bytes,
            grad_gather=whole if b.s.sp else None,
        )
    experts = None if dense else work.model.experts
    _sequential(b, layout, experts, 0, ("join_out", "predicted"))
    b.norm("predict_norm", "predicted", "predict_norm_out")
    _beside(b, "hand_on", ("final_norm_out", "predict_norm_out"), "layer_output")
    return b.table("layer")


def _beside(b: Builder, name: str, inputs: tuple[str, str], out: str) -> None:
    """Add the copy of two tensors into one tensor `out`, side by side in its columns."""
    b.add(out, b.s.shard_tokens, 2 * b.model.hidden * b.e)
    moved = (Elementwise(2 * b.nbytes(out)),)
    b.op(name=name, inputs=inputs, outputs=(out,), forward=moved, backward_input=moved)


def _attention(b: Builder, x: str, window: int) -> None:
    """Add attention from the tensor `x` to `proj_out`."""
    model, s = b.model, b.s
    if model.latent is not None:
        add_latent(b, model.latent, x)
    else:
        _heads(b, x)
    b.attention(window)
    b.row("proj", "attn_out", "proj_out", s.out_width, bias=model.proj_bias)


def _heads(b: Builder, x: str) -> None:
    """Add the projections from the tensor `x` to queries, keys and values, and their norms."""
    model, s = b.model, b.s
    rope: tuple[Kernel, ...] = ()
    if model.position == "rope":
        turned = int(s.tokens * (s.q_width + s.kv_width) * model.rotary_share)
        rope = (Named("rope", b.system.rope_kernel, turned, b.e),)
    widths = {"q": s.q_width, "k": s.kv_width, "v": s.kv_width}
    projected = {b.projected(name): width for name, width in widths.items()}
    raw = {f"{name}_raw" if _is_normed(b, name) else name: n for name, n in projected.items()}
    b.column("qkv", x, raw, rope, bias=model.qkv_bias)
    for name, width in projected.items():
        if _is_normed(b, name):
            b.head_norm(f"{name[0]}_norm", f"{name}_raw", name, width)


def _norm(b: Builder, name: str, x: str, has: bool) -> str:
    """Add a norm if the model has it, and return its output's name; otherwise return `x`."""
    if not has:
        return x
    b.norm(name, x, f"{name}_out")
    return f"{name}_out"


def _is_normed(b: Builder, name: str) -> bool:
    """Whether a norm of heads follows the projection `name`."""
    return b.model.qk_norm and name[0] in "qk"


def _mlp(b: Builder, x: str) -> None:
    """Add the MLP from the tensor `x` to `fc2_out`. ReLU saves its output, which `fc2` also saves;
    squared ReLU saves one tensor, as GELU does."""
    ffn, model = b.s.ffn, b.model
    if not model.gated:
        b.column("fc1", x, {"up_out": ffn}, bias=model.mlp_bias)
        saved = "fc2_in" if model.mlp == "relu" else "up_out"
        scalars = 2 if model.mlp == "xielu" else 0
        b.pointwise("act", ("up_out",), "fc2_in", (saved,), parameters=scalars)
    else:
        b.column("fc1", x, {"gate_out": ffn, "up_out": ffn}, bias=model.mlp_bias)
        if b.system.kernels.fused_swiglu:
            b.pointwise("act", ("gate_out", "up_out"), "fc2_in", ("gate_out", "up_out"))
        else:
            b.pointwise("act", ("gate_out",), "act_out", ("gate_out",))
            b.pointwise("mul", ("act_out", "up_out"), "fc2_in", ("act_out", "up_out"))
    b.row("fc2", "fc2_in", "fc2_out", ffn, bias=model.mlp_bias)


def head_table(work: Workload, layout: Layout, system: System) -> OpTable:
    """The head: final norm, output projection over a vocabulary shard, and cross-entropy. If a
    layer predicts one more token, the head has no norm, and logits for both predictions."""
    b = Builder(work, layout, system, True)
    x, bias = "final_norm_out", work.model.head_bias
    if work.model.mtp_layers:
        x = b.add("layer_output", b.s.shard_tokens, 2 * work.model.hidden * b.e)
        b.column("predict_head", x, {"predict_logits": b.s.vocab}, bias=bias)
        b.ops[-1] = replace(b.ops[-1], parameters=0)  # the weight is that of lm_head
        _loss(b, "predict_loss", "predict_logits", ())
    elif work.model.embedding_width:
        x = _narrow_head(b)
    else:
        b.norm("final_norm", b.shard("layer_output"), x)
    b.column("lm_head", x, {"logits": b.s.vocab}, bias=bias, width=work.model.embedding_width)
    _loss(b, "loss", "logits", _beside_loss(b))
    return b.table("head")


class SharedVocabulary(NamedTuple):
    """A vocabulary whose rows all pipeline stages share. `share`: the operators on a stage's rows;
    `norm`: the head's operators, which stay on the last stage; `positions`: embedding parameters
    that stay on the first stage."""

    share: OpTable
    norm: OpTable
    positions: int


def shared_vocabulary(
    work: Workload, layout: Layout, system: System, embedding: OpTable, head: OpTable
) -> SharedVocabulary:
    """The parts of the embedding and the head.  The loss's traffic is that of the torch operators
    of sail-sg/VocabularyParallelism (megatron/core/tensor_parallel/vocab_output.py): a copy in
    fp32, maximum, difference, exponential, sum, and division by the stage's sum, in place; after
    the barrier, multiplication by the factor of all stages' sum, and a copy in 16 bits."""
    model, pp = work.model, layout.pp
    rows = system.padded_vocab(model.vocab, layout.tp * pp) // pp
    table = head_table(replace(work, model=replace(model, vocab=rows)), layout, system)
    looked_up = memory_kernel(2 * embedding.activations["layer_input"].nbytes)
    lookup = Op(
        name="lookup",
        inputs=(),
        outputs=(),
        forward=looked_up,
        backward_weight=looked_up,
        parameters=rows * model.hidden,
    )
    wide, narrow = (table.activations[name].nbytes for name in ("loss_saved", "logits"))
    loss = replace(
        table.op("loss"),
        forward=(Elementwise(narrow + 9 * wide, 6),),
        backward_input=(Elementwise(narrow + 3 * wide, 2),),
    )
    norm = head.op("final_norm")
    names = (*norm.inputs, *norm.outputs, *norm.saves)
    kept = {name: tensor for name, tensor in head.activations.items() if name in names}
    alone = OpTable(part="head", ops=(norm,), activations=kept)
    whole = system.padded_vocab(model.vocab, layout.tp) // layout.tp * model.hidden
    return SharedVocabulary(
        replace(table, ops=(lookup, table.op("lm_head"), loss)),
        with_saved(alone, norm.outputs[:1]),
        embedding.parameters - whole,
    )


def _loss(b: Builder, name: str, logits: str, beside: tuple[str, ...]) -> None:
    """Add the cross-entropy of logits. `beside`: tensors that stay in memory besides the saved
    one."""
    s, e, system = b.s, b.e, b.system
    logits_bytes = b.nbytes(logits)
    wide = max(4, e) if system.loss.logits_fp32 else e
    saved = (b.add(f"{name}_saved", s.tokens, s.vocab * wide, False), *beside)
    statistics = Comm("all_reduce", "tp", 3 * s.tokens * max(4, e)) if s.tp > 1 else None
    passes = 1 if system.loss.fused_loss else 4
    scratch = _loss_scratch(system, logits_bytes, s.tokens * s.vocab * wide, sharded=s.tp > 1)
    b.op(
        name=name,
        inputs=(logits,),
        outputs=saved,
        saves=saved,
        forward=(Elementwise(logits_bytes + (passes + 1) * s.tokens * s.vocab * wide, passes + 2),),
        backward_input=(Elementwise(2 * s.tokens * s.vocab * wide + logits_bytes, 2),),
        reduce=statistics,
        scratch_forward_bytes=scratch[0],
        scratch_backward_bytes=scratch[1],
        holds=("final_norm_out",)
        if system.loss.shifts_logits and "final_norm_out" in b.activations
        else (),
    )


def _beside_loss(b: Builder) -> tuple[str, ...]:
    """Add the tensors of logits that stay in memory besides the one that the loss saves, and return
    their names: the tanh of an eager soft cap, and the model's output if the training loop holds it
    (here until the end of the loss's backward)."""
    widths = {
        "logits_capped": b.e if b.system.kernels.eager_operators and b.model.logit_soft_cap else 0,
        "logits_held": b.system.loss.held_logit_bytes,
    }
    return tuple(b.add(n, b.s.tokens, b.s.vocab * w, False) for n, w in widths.items() if w)


def _loss_scratch(
    system: System, logits_bytes: int, wide_bytes: int, *, sharded: bool
) -> tuple[int, int]:
    """Forward and backward scratch bytes of an unfused loss; `sharded`: the vocabulary is split.

    The logits, the saved softmax and the logits' gradient are counted elsewhere. Forward: the fp32
    copy of the logits (Megatron also keeps the logits meanwhile; F.cross_entropy of
    `model(x).float()` does not), and the copy without the last token. Backward, unless in place:
    the gradients of the log-probabilities and of the fp32 logits, before the gradient of the logits
    exists; with sharded logits also the sum of both (torch 2.11,
    distributed/tensor/parallel/loss.py, `(grad_input + torch.exp(x)) * grad_output`).
    """
    shifted = wide_bytes if system.loss.shifts_logits else 0
    if system.loss.fused_loss:
        return shifted, 0
    copy = wide_bytes if system.loss.logits_fp32 and system.loss.loss_keeps_logits else 0
    if system.loss.loss_in_place:
        return copy + shifted, 0
    forward = copy + shifted if shifted else max(0, copy - logits_bytes)
    return forward, (3 if sharded else 2) * wide_bytes - logits_bytes
