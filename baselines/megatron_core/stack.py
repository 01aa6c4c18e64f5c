"""Extra tensors, not in the operator table, of Megatron-core 0.16.1 without TransformerEngine.

Sizes come from shapes; per layer they equal the traced bytes (tests/baselines/test_stack.py).
"""

from functools import partial

from baselines.megatron_core import attention, offloads
from baselines.megatron_core.plan import MegatronCore
from rematbench.costs.operators.ops import Part
from rematbench.engine.program.program import RankProgram
from rematbench.inputs.shapes import shapes
from rematbench.problem import Problem
from rematbench.workload import Latent
from rematbench.worlds.packages.stack import Extra, Stack


def stack(policy: MegatronCore, problem: Problem) -> Stack:
    """The extra tensors that Megatron-core without TransformerEngine keeps."""
    s = shapes(problem.workload, problem.layout, problem.system)
    return Stack(
        extras=(
            *_norms(problem),
            *_rope(policy, problem),
            *_glu(policy, problem),
            *_embedding(problem),
            *attention.inside(policy, problem),
            *_adds(problem),
            *_sums(problem),
            *_scattered(problem),
            *_tied(problem),
            *_head_norms(problem),
            *_counts(problem),
            _labels(problem),
        ),
        fused_swiglu=policy.bias_activation_fusion,
        shares_gathers=s.sp,
        loss_over_logits=True,  # or over their fp32 copy
        once=_once(policy, problem),
    )


def activation_peak(policy: MegatronCore, _: Problem, rank: RankProgram) -> int:
    """The peak bytes of activations, as Megatron-core holds them."""
    found: int = offloads.activation_peak(policy, rank)
    return found


def _glu(policy: MegatronCore, problem: Problem) -> tuple[Extra, ...]:
    s = shapes(problem.workload, problem.layout, problem.system)
    if policy.bias_activation_fusion or not problem.workload.model.gated:
        return ()
    copied = Extra(
        name="up_out_offset",
        dtype=problem.workload.precision,
        rows=s.tokens,
        row_bytes=s.ffn * s.element_bytes,
        producer="mul",
        saved_by="mul",
        why="glu_linear_offset (0) is added to up before the product",
    )
    return (copied,)


def _rope(policy: MegatronCore, problem: Problem) -> tuple[Extra, ...]:
    s = shapes(problem.workload, problem.layout, problem.system)
    model, e = problem.workload.model, s.element_bytes
    made = partial(Extra, dtype=problem.workload.precision)
    tables = made(
        name="rope_tables",
        producer="q_up" if model.latent else "qkv",
        rows=s.seq_len // s.cp,
        row_bytes=4 * (model.latent.rope if model.latent else model.head_dim) * e,
        saved_by="attention",
        why="cosine and sine of each position, for q and for k",
    )
    if model.latent is not None:
        return (tables,)
    whole = made(
        name="qkv_before_rope",
        producer="qkv",
        rows=s.tokens,
        row_bytes=(s.q_width + s.kv_width) * e,
        saved_by="attention",
        why="v is a view of the projection's output, so q and k before RoPE stay with it",
    )
    repeated = made(
        name="kv_repeated",
        rows=s.tokens,
        row_bytes=2 * (s.q_width - s.kv_width) * e,
        producer="attention",
        saved_by="attention",
        why="k and v are saved once per query head (and v's view is gone)",
    )
    rotated = s.kv_width + s.q_width * (s.kv_width > model.head_dim)  # k rotated, q copied before
    width = s.q_width + 2 * s.kv_width + rotated * (model.position == "rope")
    projected = made(
        name="qkv_variable",
        rows=s.tokens,
        row_bytes=width * e,
        producer="attention",
        forward=True,
        why="the projection's output, of which copies are saved: a variable until it returns",
    )
    kept = policy.recompute != "selective" or "core_attn" not in policy.modules
    grouped = s.kv_width < s.q_width and s.cp == 1 and kept
    copies = (repeated, projected) if grouped else ()
    if model.position == "rope":
        return (tables, *(copies or (whole,)))
    views = _views(problem, repeated=grouped)
    return (repeated, *views) if grouped and views else (*copies, *views)


def _views(problem: Problem, *, repeated: bool) -> tuple[Extra, ...]:
    """Tensors that views of the projection's output keep alive, for models without RoPE. q is a
    view of the projection's output where a rank has one group of heads, and a copy where it has
    more; k and v are views unless they are repeated."""
    s = shapes(problem.workload, problem.layout, problem.system)
    one = s.kv_width == problem.workload.model.head_dim
    if s.q_width == s.kv_width or one != repeated:
        return ()
    if one and problem.attention != "flash" and s.micro_batch > 1:  # batch and heads merge:
        return ()  # q is a copy, too
    beside = Extra(
        name="qkv_beside_views",
        dtype=problem.workload.precision,
        rows=s.tokens,
        row_bytes=(2 * s.kv_width if one else s.q_width) * s.element_bytes,
        producer="qkv",
        saved_by="attention",
        why="views keep the projection's whole output: of it k and v, or q, are saved once more",
    )
    return (beside,)


def _once(policy: MegatronCore, problem: Problem) -> dict[str, int]:
    """Bytes of tensors that exist once. One buffer serves gathered inputs and the first operand of
    the scores; ids and angles of positions are shared by all layers."""
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
    if model.latent is not None:  # a table for each layer
        found["angles of RoPE (fp32)"] = _angles(problem, model.latent)
    elif model.position == "rope" and not policy.offload_modules:  # else made before the metering
        each = 4 * model.head_dim * s.seq_len // s.cp
        found["angles of RoPE (fp32)"] = problem.layout.vpp * each  # one table per chunk
    return found


def _angles(problem: Problem, given: Latent) -> int:
    """Bytes of the angles of positions, of which each layer of a rank has a table."""
    layers = -(-problem.workload.model.num_layers // problem.layout.pp)
    return 4 * given.rope * problem.workload.seq_len // problem.layout.cp * layers


def _routing(policy: MegatronCore, problem: Problem) -> int:
    """Bytes of a token that the dispatchers of a rank's layers keep until their next forward: the
    probabilities by expert (fp32) and the map of tokens to experts.  Where the module is
    recomputed, also the order of tokens, which is saved otherwise."""
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


def _counts(problem: Problem) -> tuple[Extra, ...]:
    """The tokens of each expert, which the auxiliary loss saves with its factor."""
    experts = problem.workload.model.experts
    if experts is None or not experts.aux_loss:
        return ()
    saved = Extra(
        name="expert_counts",
        dtype="int64, fp32",
        rows=1,
        row_bytes=8 * experts.count + 4,
        producer="router",
        saved_by="router",
        why="tokens of each expert, and the factor of the auxiliary loss",
    )
    return (saved,)


def _head_norms(problem: Problem) -> tuple[Extra, ...]:
    """1/rms of each head of queries and of keys, and the projection's output, of which queries
    (copied for their norm) and values (copied by attention) are kept once more."""
    model = problem.workload.model
    if not model.qk_norm:
        return ()
    s = shapes(problem.workload, problem.layout, problem.system)
    widths = {"q_norm": s.q_width, "k_norm": s.kv_width}
    beside = Extra(
        name="qkv_beside_norms",
        dtype=problem.workload.precision,
        rows=s.tokens,
        row_bytes=(s.q_width + s.kv_width) * s.element_bytes,
        producer="qkv",
        saved_by="k_norm",
        why="the norm of keys reads a view, which keeps the projection's whole output",
    )
    norms = tuple(
        Extra(
            name=f"{op}_statistics",
            dtype="fp32",
            rows=s.tokens,
            row_bytes=4 * width // model.head_dim,
            producer=op,
            saved_by=op,
            why="1/rms of each head",
        )
        for op, width in widths.items()
    )
    return (*norms, beside)


def _norms(problem: Problem) -> tuple[Extra, ...]:
    s = shapes(problem.workload, problem.layout, problem.system)
    rms = problem.workload.model.norm == "rmsnorm"
    norms: tuple[tuple[str, Part], ...] = (
        ("q_latent_norm", "layer"),
        ("kv_latent_norm", "layer"),
        ("attn_norm", "layer"),
        ("mlp_norm", "layer"),
        ("final_norm", "head"),
    )
    return tuple(
        Extra(
            name=f"{op}_statistics",
            dtype="fp32" if rms else problem.workload.precision,
            rows=s.shard_tokens,
            row_bytes=4 if rms else 2 * s.element_bytes,
            producer=op,
            saved_by=op,
            part=part,
            why="1/rms of each row" if rms else "mean and 1/deviation of each row",
        )
        for op, part in norms
        if part == "head" or op in {op.name for op in problem.layer(0).ops}
    )


def _embedding(problem: Problem) -> tuple[Extra, ...]:
    s = shapes(problem.workload, problem.layout, problem.system)
    if s.tp == 1:
        return ()
    ids = Extra(
        name="masked_ids",
        dtype="int64 + bool",
        rows=s.tokens,
        row_bytes=9,
        producer="embedding",
        saved_by="embedding",
        part="embedding",
        why="ids of this rank's rows of the vocabulary, and which are not its own",
    )
    return (ids,)


def _adds(problem: Problem) -> tuple[Extra, ...]:
    """A bias and dropout are operators of their own before a residual is added."""
    s = shapes(problem.workload, problem.layout, problem.system)
    model = problem.workload.model
    steps = model.proj_bias + (model.dropout > 0)
    return tuple(
        Extra(
            name=f"{op}_operands",
            dtype=problem.workload.precision,
            rows=s.shard_tokens,
            row_bytes=steps * model.hidden * s.element_bytes,
            producer=op,
            forward=True,
            why="with its bias, and dropped: variables until the sum is made (_bias_dropout_add)",
        )
        for op in ("attn_add", "mlp_add")
        if steps
    )


def _labels(problem: Problem) -> Extra:
    s = shapes(problem.workload, problem.layout, problem.system)
    return Extra(
        name="label_rows",
        dtype="int64, fp32, bool",
        rows=s.tokens,
        row_bytes=(4 if problem.layout.micro_batch > 1 else 3) * 8 + 3 * 4 + 1,
        producer="loss",
        saved_by="loss",
        part="head",
        why="labels clamped, transposed, of this rank; their rows; highest and own logits; mask",
    )


def _sums(problem: Problem) -> tuple[Extra, ...]:
    """Gradients of weights, each alive together with the buffer that it is then added to. The
    gradient of a bias exists at the same time for qkv only: other biases are added by operators of
    their own. Positions are added to the embedding in the same way."""
    model = problem.workload.model
    s = shapes(problem.workload, problem.layout, problem.system)
    apart = {"proj": model.proj_bias * model.hidden, "fc2": model.mlp_bias * model.hidden}
    apart["fc1"] = model.mlp_bias * s.ffn
    words = s.vocab * model.hidden
    apart["embedding"] = min(words, problem.embedding.parameters - words)
    tables = (problem.embedding, problem.layer(0), problem.head)
    return tuple(
        Extra(
            name=f"{op.name}_weight_gradient",
            dtype=problem.workload.precision,
            rows=1,
            row_bytes=(op.parameters - apart.get(op.name, 0)) * problem.workload.element_bytes,
            producer=op.name,
            part=table.part,
            why="added to the gradient buffer by a kernel of its own",
        )
        for table in tables
        for op in table.ops
        if op.has_weight
    )


def _scattered(problem: Problem) -> tuple[Extra, ...]:
    """Shards of input gradients under sequence parallelism. The gradient of a gathered input is
    reduce-scattered into a tensor of its own before the weight's gradient is computed, and the
    whole gradient stays alive meanwhile."""
    s = shapes(problem.workload, problem.layout, problem.system)
    tables = (problem.layer(0), problem.head)
    return tuple(
        Extra(
            name=f"{op.name}_input_gradient_shard",
            dtype=problem.workload.precision,
            rows=s.shard_tokens,
            row_bytes=problem.workload.model.hidden * s.element_bytes,
            producer=op.name,
            part=table.part,
            why="reduce-scattered beside the weight's gradient, the whole one still there",
        )
        for table in tables
        for op in table.ops
        if s.sp and op.has_weight and op.gathered_bytes
    )


def _tied(problem: Problem) -> tuple[Extra, ...]:
    """The sum of the embedding's gradient and the tied projection's gradient is a new tensor."""
    s = shapes(problem.workload, problem.layout, problem.system)
    model = problem.workload.model
    if not model.tied_embeddings or problem.layout.pp > 1:
        return ()
    summed = Extra(
        name="tied_gradient_sum",
        dtype=problem.workload.precision,
        rows=s.vocab,
        row_bytes=model.hidden * s.element_bytes,
        producer="embedding",
        part="embedding",
        why="of the embedding's gradient and the output projection's, which are one weight",
    )
    return (summed,)
