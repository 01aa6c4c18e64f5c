"""The operators of the plan vocabulary on one rank: names to kernels, parameters and rows."""

from collections.abc import Callable, Iterable, Iterator
from typing import get_args

import torch
from torch import Tensor

from rematbench.workload import AdapterTarget
from rematbench.worlds.torch import arithmetic, experts
from rematbench.worlds.torch import attention_backends as attn
from rematbench.worlds.torch.groups import Group
from rematbench.worlds.torch.operands import Call, Tensors
from rematbench.worlds.torch.parameters import ADAPTED, HEAD_NORMS

Forward = Callable[[Call], Tensors]
Backward = Callable[[Call], Tensors]
Weight = Callable[[Call], None]

COLUMNS = ("qkv", "q_up", "kv_up", "fc1", "lm_head", "shared_fc1", "q_down", "kv_down")
"""The column-parallel operators, and the projections to few columns, which no rank splits: each
output has its own weight, so that none is a view."""
ROWS = ("proj", "fc2", "shared_fc2")
"""The row-parallel operators."""
NORMS = (
    *("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "final_norm"),
    *("q_latent_norm", "kv_latent_norm", *HEAD_NORMS),
)
ADAPTERS = tuple(f"lora_{target}" for target in get_args(AdapterTarget))
"""The products with the first matrix of an adapter; the linear adds those with the second."""
SUMS = ("attn_add", "mlp_add", "shared_add")


# -- attention ----------------------------------------------------------------------------------


def _whole_sequences(heads: Tensor, ranks: int, batch: int) -> Tensor:
    """(ranks batch part) x columns -> (batch sequence) x columns."""
    parts = heads.view(ranks, batch, -1, heads.shape[-1])
    return parts.transpose(0, 1).reshape(-1, heads.shape[-1])


def _by_rank(sequences: Tensor, ranks: int, batch: int) -> Tensor:
    """(batch sequence) x columns -> (ranks batch part) x columns."""
    return _whole_sequences(sequences, batch, ranks)


def _heads(call: Call, x: Tensor, heads: int) -> Tensor:
    """rows x columns -> batch x heads x rows x columns of a head."""
    shape, ranks = call.model.attention, call.model.problem.layout.ulysses
    if ranks > 1:
        x = _whole_sequences(x, ranks, shape.batch)
    return x.view(shape.batch, -1, heads, x.shape[-1] // heads).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    """batch x heads x rows (x head_dim) -> rows x columns."""
    y = x.transpose(1, 2)
    return y.reshape(y.shape[0] * y.shape[1], -1)


def _columns(call: Call, x: Tensor) -> Tensor:
    """batch x heads x rows x head_dim -> rows x columns, ordered by rank under Ulysses."""
    ranks, batch = call.model.problem.layout.ulysses, call.model.attention.batch
    return _by_rank(_flat(x), ranks, batch) if ranks > 1 else _flat(x)


def slice_order(call: Call) -> list[int]:
    """For each slice of a sequence, its index among the slices that the ranks hold one after
    another. The indices are Python numbers for views, because an index tensor would need a blocking
    copy to a GPU in every call."""
    cp = call.model.problem.layout.cp
    ends = [(r, 2 * cp - 1 - r) for r in range(cp)]
    at = {position: 2 * r + i for r, pair in enumerate(ends) for i, position in enumerate(pair)}
    return [at[i] for i in range(2 * cp)]


def _in_order(slices: Tensor, order: list[int]) -> Tensor:
    """batch x slices x ...: a new tensor with the slices in the given order."""
    return torch.cat([slices[:, place : place + 1] for place in order], 1)


def _whole_kv(call: Call, name: str) -> Tensor:
    """Keys or values of whole sequences, in the order of positions."""
    shape, cp = call.model.attention, call.model.problem.layout.cp
    if cp == 1:
        return _heads(call, call.tensors[name], shape.kv_heads)
    full = call.tensors["full"].view(call.model.dtype)
    sizes = [call.unit.table.activations[each].nbytes for each in ("k", "v")]
    at = full.numel() * sizes[0] // sum(sizes)
    full, dim = (full[:at], shape.head_dim) if name == "k" else (full[at:], shape.v_dim)
    by_slice = full.view(cp, shape.batch, 2, -1, shape.kv_heads, dim)
    by_slice = by_slice.permute(1, 0, 2, 3, 4, 5).reshape(
        shape.batch, 2 * cp, -1, shape.kv_heads, dim
    )
    return _in_order(by_slice, slice_order(call)).flatten(1, 2).transpose(1, 2)


def _to_ranks(call: Call, grad: Tensor) -> Tensor:
    """The gradient of whole keys or values, as the ranks' rows one after another."""
    shape, cp = call.model.attention, call.model.problem.layout.cp
    parts = grad.transpose(1, 2).reshape(shape.batch, 2 * cp, -1)
    positions = sorted(range(2 * cp), key=slice_order(call).__getitem__)
    back = _in_order(parts, positions)
    return back.view(shape.batch, cp, -1).transpose(0, 1).reshape(-1)


def attention(call: Call) -> Tensors:
    shape, model = call.model.attention, call.model
    q = _heads(call, call.tensors["q"], shape.heads)
    k, v = _whole_kv(call, "k"), _whole_kv(call, "v")
    pairs = sum((b.q1 - b.q0) * (b.k1 - b.k0) / (1 + b.causal)
                for g in attn.blocks(q.shape[2], model.slices, k.shape[2]) for b in g)  # fmt: skip
    model.flop += 2.0 * pairs * shape.heads * (shape.head_dim + shape.v_dim) * shape.batch
    if "attn_probs" in call.op.outputs:
        probs = attn.probabilities(q, k)
        out = probs @ attn.repeat(v, shape.heads)
        probs = probs.view(shape.batch * shape.rows, -1)
        return {call.op.outputs[0]: _columns(call, out), "attn_probs": probs}
    out, lse = attn.attend(q, k, v, model.slices, model.problem.kernel)
    return {call.op.outputs[0]: _columns(call, out), "lse": _flat(lse)}


def attention_backward(call: Call) -> Tensors:
    shape = call.model.attention
    grad = _heads(call, call.grads[0], shape.heads)
    q = _heads(call, call.tensors["q"], shape.heads)
    k, v = _whole_kv(call, "k"), _whole_kv(call, "v")
    if "attn_probs" in call.op.outputs:
        probs = call.tensors["attn_probs"].view(shape.batch, shape.heads, shape.rows, -1)
        dq, dk, dv = attn.unfused_backward(grad, q, k, v, probs)
        return {"q": _columns(call, dq), "k": _columns(call, dk), "v": _columns(call, dv)}
    out = _heads(call, call.tensors[call.op.outputs[0]], shape.heads)
    lse = call.tensors["lse"].view(shape.batch, -1, shape.heads).transpose(1, 2)
    dq, dk, dv = attn.attend_backward(
        grad, q, k, v, out, lse, call.model.slices, call.model.problem.kernel
    )
    if "full" in call.tensors:
        return {"q": _flat(dq), "part": torch.cat([_to_ranks(call, dk), _to_ranks(call, dv)])}
    return {"q": _columns(call, dq), "k": _columns(call, dk), "v": _columns(call, dv)}


# -- embedding and loss --------------------------------------------------------------------------


def embedding(call: Call) -> Tensors:
    model = call.model
    ids = call.rows(model.batches[call.span.micro_batch].ids)
    table = call.parameter("embedding").value
    out = arithmetic.embed(ids, table, model.vocab_start, whole=model.problem.layout.tp == 1)
    if model.kind.position == "learned" and model.tp_rank == 0:  # by one rank of the group
        out = out + call.parameter("position").value[call.rows(model.where)]
    return {"layer_input": out}


def embedding_weight(call: Call) -> None:
    model = call.model
    ids = call.rows(model.batches[call.span.micro_batch].ids)
    total = call.parameter("embedding").grad
    whole = model.problem.layout.tp == 1
    arithmetic.embed_backward(total, call.grads[0], ids, model.vocab_start, whole=whole)
    if model.kind.position == "learned":
        total = call.parameter("position").grad
        total.index_add_(0, call.rows(model.where), call.grads[0].to(total.dtype))


def loss(call: Call) -> Tensors:
    """A copy of the logits in the loss's dtype, -inf in the padded vocabulary's columns."""
    saved = call.model.dtype_of(call.unit.table.activations["loss_saved"])
    copy = call.input().to(saved, copy=True)
    copy[:, max(0, call.model.kind.vocab - call.model.vocab_start) :] = float("-inf")
    return {"loss_saved": copy}


def finish_loss(call: Call, group: Group) -> Tensor:
    """Turn logits into softmax in place, over vocabulary shards; return the sum of losses."""
    model, saved = call.model, call.tensors["loss_saved"]
    labels = call.rows(model.batches[call.span.micro_batch].labels)
    top = saved.amax(-1)
    group.all_reduce(top, "max")
    saved.sub_(top[:, None])
    column, mine = arithmetic.shard_labels(labels, model.vocab_start, saved.shape[-1])
    target = saved.gather(1, column[:, None])[:, 0].masked_fill(~mine, 0.0)
    saved.exp_()
    sums = torch.stack([saved.sum(-1), target])
    group.all_reduce(sums)
    saved.div_(sums[0][:, None])
    return (sums[0].log() - sums[1]).masked_fill(labels == arithmetic.IGNORED, 0.0).sum()


def loss_backward(call: Call) -> Tensors:
    model = call.model
    batch = model.batches[call.span.micro_batch]
    probs, labels = call.tensors["loss_saved"], call.rows(batch.labels)
    first = model.vocab_start
    return {
        "logits": arithmetic.cross_entropy_backward(probs, labels, first, batch.scale, model.dtype)
    }


# -- norms ----------------------------------------------------------------------------------------


def _norm(call: Call) -> Tensors:
    """A norm of rows, or of each head; RoPE follows the norms of heads."""
    weight, bias = call.parameter(call.op.name).value, call.bias(call.op.name)
    x = call.input()
    groups = x.view(-1, weight.shape[0])
    if call.model.columns and call.op.name not in HEAD_NORMS:
        out = arithmetic.split_norm(groups, weight, bias, *_split(call.model.columns, groups))
    elif bias is None:
        out = arithmetic.rms_norm(groups, weight)
    else:
        out = arithmetic.layer_norm(groups, weight, bias)
    out = out.view(x.shape)
    if call.op.name in HEAD_NORMS:
        out = _rotated(call, out)
    return {call.op.outputs[0]: out}


def _split(group: Group, x: Tensor) -> tuple[int, Callable[[Tensor], None]]:
    """The columns of whole rows, of which each rank of a group has as many as `x`, and the sum over
    the group."""
    return group.size * x.shape[-1], group.all_reduce


def _norm_backward(call: Call) -> Tensors:
    weight, x, grad = call.parameter(call.op.name), call.input(), call.grads[0]
    if call.op.name in HEAD_NORMS:
        grad = _rotated(call, grad, inverse=True)
    grad, groups = (each.view(-1, weight.shape.numel()) for each in (grad, x))
    if call.model.columns and call.op.name not in HEAD_NORMS:
        split, bias = _split(call.model.columns, groups), call.bias(call.op.name)
        centred = bias is not None
        dx, dw, db = arithmetic.split_norm_backward(grad, groups, weight.value, centred, *split)
        if centred:
            call.parameter(f"{call.op.name}.bias").grad.add_(db)
    elif call.bias(call.op.name) is None:
        dx, dw = arithmetic.rms_norm_backward(grad, groups, weight.value)
    else:
        dx, dw, db = arithmetic.layer_norm_backward(grad, groups, weight.value)
        if weight.spec.trained:
            call.parameter(f"{call.op.name}.bias").grad.add_(db)
    if weight.spec.trained:
        weight.grad.add_(dw)
    return {call.op.inputs[0]: dx.view(x.shape)}


# -- linears --------------------------------------------------------------------------------------


def _weights(call: Call) -> list[tuple[str, str]]:
    """(output, weight) pairs of a column-parallel operator."""
    if call.op.name == "lm_head":
        return [("logits", "lm_head")]
    return [(o, o.removesuffix("_raw").removesuffix("_rows")) for o in call.op.outputs]


def _column(call: Call) -> Tensors:
    x, found = call.input(), Tensors()
    adds = call.model.column == 0  # one of the ranks that sum adds the bias
    for out, name in _weights(call):
        if out in call.wanted:
            made = call.linear(x, name, call.bias(name) if adds else None)
            found[out] = _turned(call, name, _adapted(call, name, made))
    return found


def _adapter(call: Call, name: str) -> str:
    """The adapter of a linear by the local name of its weight; empty if it has none."""
    target = next((t for t, weight in ADAPTED.items() if weight == name), name)
    low = f"lora_{target}"
    return low if low in call.op.inputs else ""


def _adapted(call: Call, name: str, out: Tensor) -> Tensor:
    """A linear's output with that of its adapter."""
    low = _adapter(call, name)
    return out + call.linear(call.tensors[low], f"{low}.b", None) if low else out


def _differentiable(call: Call, name: str) -> bool:
    return call.unit.table.activations[name].differentiable


def _low_gradients(call: Call, gradients: Iterable[tuple[str, Tensor]]) -> Tensors:
    """The gradients of the products with A, in the order of the operator's inputs."""
    found = {
        low: grad @ call.parameter(f"{low}.b").value
        for name, grad in gradients
        if (low := _adapter(call, name)) and _differentiable(call, low)
    }
    return {name: found[name] for name in call.op.inputs if name in found}


def _add_weight_gradient(call: Call, name: str, grad: Tensor) -> None:
    """Add the gradient of a linear's weight and bias, or of its adapter's B, from that of its
    output."""
    if low := _adapter(call, name):
        arithmetic.add_weight_gradient(call.parameter(f"{low}.b").grad, grad, call.tensors[low])
    if not call.parameter(name).spec.trained:
        return
    arithmetic.add_weight_gradient(call.parameter(name).grad, grad, call.input())
    if call.bias(name) is not None:
        call.parameter(f"{name}.bias").grad.add_(grad.sum(0))


def _turned(call: Call, name: str, x: Tensor, *, inverse: bool = False) -> Tensor:
    """x after RoPE if the operator rotates `name`: RoPE is a part of the qkv operator, or of the
    norms of queries and keys."""
    rotates = name in ("q", "k") and not call.model.kind.qk_norm
    return _rotated(call, x, inverse=inverse) if rotates else x


def _rotated(call: Call, x: Tensor, *, inverse: bool = False) -> Tensor:
    """x after RoPE, if the model has it; of heads of latent attention the last columns."""
    model, latent = call.model, call.model.kind.latent
    if model.kind.position != "rope":
        return x
    cos, sin = call.rows(model.cos), call.rows(model.sin)
    if latent is None or call.op.name == "k_turn":
        return arithmetic.rope(x, cos, sin, inverse=inverse)
    out = x.clone()
    heads = out.view(x.shape[0], -1, latent.qk)[..., latent.nope :]
    heads.copy_(arithmetic.rope(heads.contiguous(), cos, sin, inverse=inverse).view(heads.shape))
    return out


def _turn(call: Call) -> Tensors:
    return {call.op.outputs[0]: _rotated(call, call.input())}


def _turn_backward(call: Call) -> Tensors:
    return {call.op.inputs[0]: _rotated(call, call.grads[0], inverse=True)}


def _join(call: Call) -> Tensors:
    """A head's own columns of keys, then those that all heads share."""
    own, shared = (call.tensors[name] for name in call.op.inputs)
    heads = own.view(own.shape[0], call.model.shapes.heads, -1)
    every = shared[:, None].expand(-1, heads.shape[1], -1)
    return {call.op.outputs[0]: torch.cat([heads, every], -1).flatten(1)}


def _join_backward(call: Call) -> Tensors:
    grad = call.grads[0].view(call.grads[0].shape[0], call.model.shapes.heads, -1)
    latent = call.model.kind.latent
    assert latent is not None
    own, shared = torch.split(grad, [latent.nope, latent.rope], -1)
    parts = own.flatten(1), shared.sum(1)
    return dict(zip(call.op.inputs, parts, strict=True))


def _column_gradients(call: Call) -> Iterator[tuple[str, Tensor]]:
    """(weight, gradient of the operator's output), in the order of the outputs."""
    return ((name, grad) for (_, name), grad in zip(_weights(call), call.grads, strict=True))


def _column_backward(call: Call) -> Tensors:
    """Return the input gradient. If RoPE has rotated an output, the rotation of its gradient is
    undone in place, because the weight gradient reads this storage next."""
    dx: Tensor | None = None
    x, gradients = call.op.inputs[0], list[tuple[str, Tensor]]()
    for name, turned in _column_gradients(call):
        grad = _turned(call, name, turned, inverse=True)
        if call.grads_are_views and grad is not turned:
            turned.copy_(grad)
        gradients.append((name, grad))
        if _differentiable(call, x):
            weight = call.parameter(name).value
            dx = grad @ weight if dx is None else torch.addmm(dx, grad, weight)
    return ({} if dx is None else {x: dx}) | _low_gradients(call, gradients)


def _column_weight(call: Call) -> None:
    for name, found in _column_gradients(call):
        back = call.grads_are_views  # turned back already
        grad = found if back else _turned(call, name, found, inverse=True)
        _add_weight_gradient(call, name, grad)


def _row(call: Call) -> Tensors:
    """This rank's partial sum; one rank of the group adds the bias."""
    bias = call.bias(call.op.name) if call.model.tp_rank == 0 else None
    out = call.linear(call.input(), call.op.name, bias)
    return {call.op.outputs[0]: _adapted(call, call.op.name, out)}


def _row_backward(call: Call) -> Tensors:
    x, dx = call.op.inputs[0], Tensors()
    if _differentiable(call, x):
        dx[x] = call.grads[0] @ call.parameter(call.op.name).value
    return dx | _low_gradients(call, [(call.op.name, call.grads[0])])


def _row_weight(call: Call) -> None:
    _add_weight_gradient(call, call.op.name, call.grads[0])


# -- pointwise ------------------------------------------------------------------------------------


SUM_PIECES = 16
"""Pieces in which a sum is computed whose result is dropped. Recomputation ends with the layer's
output, and the ledger has no whole tensor for it."""


def _residual(call: Call) -> Tensors:
    x, skip = (call.tensors[name] for name in call.op.inputs)
    if call.op.outputs[0] in call.wanted:
        return {call.op.outputs[0]: x + skip}
    for rows, added in zip(x.chunk(SUM_PIECES), skip.chunk(SUM_PIECES), strict=True):
        torch.add(rows, added)
    return {}


def _act(call: Call) -> Tensors:
    kind = call.model.kind.mlp
    out = arithmetic.activation(call.tensors[call.op.inputs[0]], kind)
    if len(call.op.inputs) == 2:  # fused with the product
        out = out * call.tensors[call.op.inputs[1]]
    return {call.op.outputs[0]: out}


def _act_backward(call: Call) -> Tensors:
    kind, grad, gate = call.model.kind.mlp, call.grads[0], call.tensors[call.op.inputs[0]]
    if len(call.op.inputs) == 1:
        return {call.op.inputs[0]: arithmetic.activation_backward(grad, gate, kind)}
    up = call.tensors[call.op.inputs[1]]
    return {
        call.op.inputs[0]: arithmetic.activation_backward(grad * up, gate, kind),
        call.op.inputs[1]: grad * arithmetic.activation(gate, kind),
    }


def _mul(call: Call) -> Tensors:
    return {"fc2_in": call.tensors["act_out"] * call.tensors["up_out"]}


def _mul_backward(call: Call) -> Tensors:
    grad = call.grads[0]
    return {"act_out": grad * call.tensors["up_out"], "up_out": grad * call.tensors["act_out"]}


# -- by name --------------------------------------------------------------------------------------

FORWARD: dict[str, Forward] = {
    **dict.fromkeys(NORMS, _norm),
    **dict.fromkeys(COLUMNS, _column),
    **dict.fromkeys((*ROWS, *ADAPTERS), _row),
    **dict.fromkeys(SUMS, _residual),
    "k_turn": _turn,
    "k_join": _join,
    "attention": attention,
    **dict.fromkeys(("act", "shared_act"), _act),
    "mul": _mul,
    "embedding": embedding,
    "loss": loss,
    **experts.FORWARD,
}
BACKWARD_INPUT: dict[str, Backward] = {
    **dict.fromkeys(NORMS, _norm_backward),
    **dict.fromkeys(COLUMNS, _column_backward),
    **dict.fromkeys((*ROWS, *ADAPTERS), _row_backward),
    "k_turn": _turn_backward,
    "k_join": _join_backward,
    "attention": attention_backward,
    **dict.fromkeys(("act", "shared_act"), _act_backward),
    "mul": _mul_backward,
    "loss": loss_backward,
    **experts.BACKWARD_INPUT,
}
BACKWARD_WEIGHT: dict[str, Weight] = {
    **dict.fromkeys(COLUMNS, _column_weight),
    **dict.fromkeys((*ROWS, *ADAPTERS), _row_weight),
    "embedding": embedding_weight,
    **experts.BACKWARD_WEIGHT,
}
