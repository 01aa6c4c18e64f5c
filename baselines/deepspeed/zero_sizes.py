"""The model's parameters in DeepSpeed's order and in the order of their gradients, and the sizes
and settings that determine ZeRO's memory."""

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from rematbench.workload import Model

ZERO_2, ZERO_3 = 2, 3
KEPT_WHOLE = 100_000
"""stage3_param_persistence_threshold of deepspeed 0.19.8, in elements."""


class Weight(NamedTuple):
    """A parameter of a part (E, L<i>, H). `op` is its operator, and `output` the output whose
    gradient it needs (empty for a bias, a norm or a table). `elements` is its size, and `offset`
    its first element in DeepSpeed's flat parameters (in the order of `model.parameters()`)."""

    op: str
    output: str
    elements: int
    part: str = ""
    offset: int = 0


def layer_weights(model: Model) -> tuple[Weight, ...]:
    """The matrices of a layer in the order of its forward."""
    h, ffn = model.hidden, model.ffn
    gate = [Weight("fc1", "gate_out", h * ffn)] if model.gated else []
    return (
        Weight("qkv", "q", h * model.q_width),
        Weight("qkv", "k", h * model.kv_width),
        Weight("qkv", "v", h * model.kv_width),
        Weight("proj", "proj_out", model.q_width * h),
        Weight("fc1", "up_out", h * ffn),
        *gate,
        Weight("fc2", "fc2_out", ffn * h),
    )


def head_weight(model: Model) -> Weight:
    return Weight("lm_head", "logits", model.vocab * model.hidden)


def tables(model: Model) -> tuple[Weight, ...]:
    tokens = Weight("embedding", "", model.vocab * model.hidden)
    if model.position != "learned":
        return (tokens,)
    return (tokens, Weight("embedding", "", model.max_positions * model.hidden))


def _norm(model: Model, op: str) -> tuple[Weight, ...]:
    count = 2 if model.norm == "layernorm" else 1
    return (Weight(op, "", model.hidden),) * count


def _biases(model: Model) -> dict[str, int]:
    """The elements of each matrix's bias, by the matrix's output; 0 without a bias."""
    fc1, qkv = model.mlp_bias * model.ffn, model.qkv_bias
    return {
        "q": qkv * model.q_width,
        "k": qkv * model.kv_width,
        "v": qkv * model.kv_width,
        "proj_out": model.proj_bias * model.hidden,
        "up_out": fc1,
        "gate_out": fc1,
        "fc2_out": model.mlp_bias * model.hidden,
    }


def _layer(model: Model) -> list[Weight]:
    post = ("post_attn_norm", "post_mlp_norm") if model.post_norm else ()
    found = [weight for op in ("attn_norm", "mlp_norm", *post) for weight in _norm(model, op)]
    biases = _biases(model)
    for matrix in layer_weights(model):
        bias = biases[matrix.output]
        found += [matrix, Weight(matrix.op, "", bias)] if bias else [matrix]
    return found


def parameters(model: Model) -> tuple[Weight, ...]:
    """All parameters in DeepSpeed's flat order; a tied output projection is the embedding."""
    found = [weight._replace(part="E") for weight in tables(model)]
    layer = _layer(model)
    for number in range(model.num_layers):
        found += [weight._replace(part=f"L{number}") for weight in layer]
    head = () if model.tied_embeddings else (head_weight(model),)
    found += [weight._replace(part="H") for weight in (*_norm(model, "final_norm"), *head)]
    ends = accumulate(weight.elements for weight in found)
    return tuple(
        weight._replace(offset=end - weight.elements)
        for weight, end in zip(found, ends, strict=True)
    )


def by_operator(model: Model) -> dict[tuple[str, str], tuple[Weight, ...]]:
    """The parameters of every (part, operator) in the order of their gradients, which is the
    reverse of the order in the operator's forward."""
    found: dict[tuple[str, str], tuple[Weight, ...]] = {}
    for weight in parameters(model):
        key = weight.part, weight.op
        found[key] = (weight, *found.get(key, ()))
    if model.tied_embeddings:
        tokens = found["E", "embedding"][-1]
        found["H", "lm_head"] = (tokens._replace(output=head_weight(model).output),)
    return found


def matrices(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    return tuple(one for one in weights if one.output or one.op == "embedding")


def small_elements(model: Model) -> int:
    """Elements of the parameters that ZeRO 3 never releases (at most KEPT_WHOLE elements each)."""
    sizes = (weight.elements for weight in parameters(model))
    return sum(size for size in sizes if size <= KEPT_WHOLE)


MAX_LIVE, REUSE, PREFETCHED = 1_000_000_000, 1_000_000_000, 50_000_000
"""Defaults of deepspeed 0.19.8, in elements. They are stage3_max_live_parameters,
stage3_max_reuse_distance and stage3_prefetch_bucket_size."""


class Sizes(NamedTuple):
    """Sizes and settings of a job under ZeRO.

    `element`: bytes of an element of weights; `reduced`: bytes of an element in reductions;
    `ranks`: ranks that share states; `bucket`: elements of the reduce bucket. `offloaded`,
    `params_on_host`: whether the optimizer, the parameters are on the host. `tiles_rebuilt`:
    whether tiles are rebuilt in layers that are recomputed. `stage`: the ZeRO stage; `overlap`:
    whether reductions overlap the backward.

    Elements under ZeRO 3: `max_live` may be whole at once, `prefetched` are fetched ahead at once,
    `reuse` is the distance within which a weight is kept for its next use, and parameters of at
    most `kept_whole` are never released.
    """

    element: int
    reduced: int
    ranks: int
    bucket: int
    offloaded: bool = False
    max_live: int = MAX_LIVE
    prefetched: int = PREFETCHED
    reuse: int = REUSE
    kept_whole: int = KEPT_WHOLE
    stage: int = 3
    overlap: bool = False
    params_on_host: bool = False
    tiles_rebuilt: bool = False
