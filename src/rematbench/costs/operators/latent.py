"""The operators of latent attention, from a layer's normed input to queries, keys and values.

Every tensor-parallel rank has the whole down-projections and runs them on its own rows. The
up-projections gather the rows and are split by heads. All heads of keys share columns with rotary
positions: a rank rotates these columns for all rows, and joins them with the other columns of its
heads. Source: DeepSeek-V2 (arXiv 2405.04434); Megatron-core 0.16.1, multi_latent_attention.py, with
TransformerEngine's duplicated linears; saved bytes from traces of its layers on fake tensors.
"""

from rematbench.costs.operators.builder import CHOSEN, Builder
from rematbench.costs.operators.kernels import Gemm, Kernel, Named
from rematbench.costs.operators.ops import Comm, memory_kernel
from rematbench.workload import Latent


def add_latent(b: Builder, given: Latent, x: str) -> None:
    """Add the operators from the tensor `x` to queries, keys and values."""
    model, s = b.model, b.s
    turned = s.tokens * s.heads * given.rope
    rope: tuple[Kernel, ...] = (Named("rope", b.system.rope_kernel, turned, b.e),)
    if b.system.kernels.rope == "eager":  # a copy joins the rotated columns with the others
        rope += memory_kernel(2 * s.tokens * s.q_width * b.e)
    source, width = x, model.hidden
    if given.q_rank:
        _down(b, "q_down", x, {"q_latent": given.q_rank})
        b.latent_norm("q_latent_norm", "q_latent", given.q_rank)
        source, width = "q_latent_norm_out", given.q_rank
    b.column("q_up", source, {b.projected("q"): s.q_width}, rope, width=width)
    _down(b, "kv_down", x, {"kv_latent": given.kv_rank, "k_rope": given.rope})
    b.latent_norm("kv_latent_norm", "kv_latent", given.kv_rank, beside=("k_rope",))
    wide = {"k_nope": s.heads * given.nope, b.projected("v"): s.out_width}
    copied = 2 * s.tokens * s.out_width * b.e * b.system.kernels.fused_linears
    copies = memory_kernel(copied) if copied else ()  # values, from the linear's output
    b.column("kv_up", "kv_latent_norm_out", wide, copies, width=given.kv_rank)
    _turn(b, given)
    _join(b, b.projected("k"))
    if given.index_top:
        _index(b, given, x, source, width)


def _down(b: Builder, name: str, x: str, outs: dict[str, int]) -> None:
    """Add a down-projection: each rank has the whole weight and projects its own rows."""
    rows, h, columns = b.s.shard_tokens, b.model.hidden, sum(outs.values())
    for out, width in outs.items():
        b.add(out, rows, width * b.e)
    b.op(
        name=name,
        inputs=(x,),
        outputs=tuple(outs),
        saves=(x,),
        forward=(Gemm(rows, columns, h),),
        backward_input=(Gemm(rows, h, columns),),
        backward_weight=(Gemm(h, columns, rows),),
        parameters=columns * (h + b.model.qkv_bias),
        replicated=True,
    )


def _index(b: Builder, given: Latent, x: str, source: str, width: int) -> None:
    """Add the indexer of sparse attention, which chooses tokens for each query (int32). Each rank
    has all of it. The choice has no gradient. Source: DeepSeek-V3.2's model.py; Transformers
    5.23.0, DeepseekV32Indexer."""
    heads, dim, rows = given.index_heads, given.index_dim, b.s.tokens
    out = b.add(CHOSEN, rows, 4 * min(given.index_top, b.s.seq_len), False)
    h, columns = b.model.hidden, heads * dim
    b.op(
        name="index",
        inputs=(x, source),
        outputs=(out,),
        row_local=False,
        forward=(Gemm(rows, columns, width), Gemm(rows, dim + heads, h)),
        parameters=columns * width + (dim + heads) * h + 2 * dim,
        replicated=True,
    )


def _turn(b: Builder, given: Latent) -> None:
    """Add the rotation of the columns that all heads of keys share, for all rows. A rank's gradient
    covers only its heads, so tensor-parallel ranks sum their gradients."""
    out = b.wide("k_turned", given.rope)
    kernel = (Named("rope", b.system.rope_kernel, b.s.tokens * given.rope, b.e),)
    nbytes = b.nbytes(out)
    back = Comm("reduce_scatter" if b.s.sp else "all_reduce", "tp", nbytes)
    b.op(
        name="k_turn",
        inputs=("k_rope",),
        outputs=(out,),
        forward=kernel,
        backward_input=kernel,
        gather=Comm("all_gather", "tp", nbytes) if b.s.sp else None,
        grad_reduce=back if b.s.tp > 1 else None,
        gathered_bytes=nbytes if b.s.sp else 0,
    )


def _join(b: Builder, out: str) -> None:
    """Add the copy that joins each head's own columns and the shared columns into whole keys."""
    b.wide(out, b.s.kv_width)
    moved = memory_kernel(b.nbytes("k_nope", "k_turned", out))
    b.op(
        name="k_join",
        inputs=("k_nope", "k_turned"),
        outputs=(out,),
        forward=moved,
        backward_input=moved,
    )
