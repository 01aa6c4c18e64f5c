"""The operators of the plan vocabulary on one rank, by name: how each computes its passes."""

from collections.abc import Callable, Iterable, Iterator
from typing import get_args

import torch
from torch import Tensor

from rematbench.costs.operators.ops import LINEAR_INPUTS, NORMS, QUANTISED
from rematbench.model import AdapterTarget
from rematbench.worlds.torch import arithmetic, ends, experts, memory, quantised
from rematbench.worlds.torch import attention_backends as attn
from rematbench.worlds.torch.batch import slice_order
from rematbench.worlds.torch.groups import Group
from rematbench.worlds.torch.operands import Call, Operator, Tensors
from rematbench.worlds.torch.parameters import ADAPTED, HEAD_NORMS

COLUMNS = (
    *("qkv", "q_up", "kv_up", "fc1", "lm_head", "shared_fc1", "q_down", "kv_down"),
    *("join", "predict_head", "memory_query", "memory_gate"),
)
"""The column-parallel operators, and narrow projections that every rank computes whole. Each output
has its own weight, so that no output is a view of another."""
ROWS = ("proj", "fc2", "shared_fc2", "memory_proj")
DROPS = tuple(f"lora_{target}_in" for target in get_args(AdapterTarget))
ADAPTERS = tuple(f"lora_{target}" for target in get_args(AdapterTarget))
"""The products with an adapter's first matrix; the linear adds those with its second matrix."""
SUMS = ("attn_add", "mlp_add", "shared_add")


# -- attention ----------------------------------------------------------------------------------


def _whole_sequences(heads: Tensor, ranks: int, batch: int) -> Tensor:
    """(ranks batch part) x columns -> (batch sequence) x columns, with whole sequences."""
    parts = heads.view(ranks, batch, -1, heads.shape[-1])
    return parts.transpose(0, 1).reshape(-1, heads.shape[-1])


def _heads(call: Call, x: Tensor, heads: int) -> Tensor:
    """rows x columns -> batch x heads x rows x columns of a head."""
    shape, ranks = call.model.attention, call.model.problem.layout.ulysses
    if ranks > 1:
        x = _whole_sequences(x, ranks, shape.batch)
    return x.view(shape.batch, -1, heads, x.shape[-1] // heads).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    y = x.transpose(1, 2)
    return y.reshape(y.shape[0] * y.shape[1], -1)


def _columns(call: Call, x: Tensor) -> Tensor:
    ranks, batch = call.model.problem.layout.ulysses, call.model.attention.batch
    return _whole_sequences(_flat(x), batch, ranks) if ranks > 1 else _flat(x)


def _in_order(slices: Tensor, order: list[int]) -> Tensor:
    """A new tensor, batch x slices x ..., with the slices in the given order. It concatenates
    views: an index tensor would need a blocking copy to a GPU in every call."""
    return torch.cat([slices[:, place : place + 1] for place in order], 1)


def _whole_kv(call: Call, name: str) -> Tensor:
    """Keys or values of whole sequences, in the order of positions."""
    shape, cp = _shape(call), call.model.problem.layout.cp
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
    return _in_order(by_slice, slice_order(cp)).flatten(1, 2).transpose(1, 2)


def _to_ranks(call: Call, grad: Tensor) -> Tensor:
    """The gradient of whole keys or values, flat, with the rows of each rank one after another."""
    shape, cp = call.model.attention, call.model.problem.layout.cp
    parts = grad.transpose(1, 2).reshape(shape.batch, 2 * cp, -1)
    positions = sorted(range(2 * cp), key=slice_order(cp).__getitem__)
    back = _in_order(parts, positions)
    return back.view(shape.batch, cp, -1).transpose(0, 1).reshape(-1)


def _shape(call: Call) -> attn.Shape:
    shape = call.model.attention
    if call.heads is None:
        return shape
    kv_heads = shape.kv_heads // call.heads.keys
    return shape._replace(heads=shape.heads // call.heads.slices, kv_heads=kv_heads)


def _of_heads(call: Call, x: Tensor) -> Tensor:
    """The columns of the call's piece of heads, from a tensor with the columns of all heads."""
    whole = call.heads is not None and call.op.outputs[0] == "attn_out"
    return call.heads.of("attn_out", x, 1) if whole and call.heads else x


def attention(call: Call) -> Tensors:
    shape, model = _shape(call), call.model
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
    shape = _shape(call)
    grad = _heads(call, _of_heads(call, call.grads[0]), shape.heads)
    q = _heads(call, call.tensors["q"], shape.heads)
    k, v = _whole_kv(call, "k"), _whole_kv(call, "v")
    if "attn_probs" in call.op.outputs:
        probs = call.tensors["attn_probs"].view(shape.batch, shape.heads, shape.rows, -1)
        dq, dk, dv = attn.unfused_backward(grad, q, k, v, probs)
        return {"q": _columns(call, dq), "k": _columns(call, dk), "v": _columns(call, dv)}
    out = _heads(call, _of_heads(call, call.tensors[call.op.outputs[0]]), shape.heads)
    lse = call.tensors["lse"].view(shape.batch, -1, shape.heads).transpose(1, 2)
    dq, dk, dv = attn.attend_backward(
        grad, q, k, v, out, lse, call.model.slices, call.model.problem.kernel
    )
    if "full" in call.tensors:
        return {"q": _flat(dq), "part": torch.cat([_to_ranks(call, dk), _to_ranks(call, dv)])}
    return {"q": _columns(call, dq), "k": _columns(call, dk), "v": _columns(call, dv)}


# -- norms ----------------------------------------------------------------------------------------


def _norm(call: Call) -> Tensors:
    """A norm of rows or of single heads. Norms of heads also apply RoPE."""
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
    """(columns of a whole row, function that sums over the group in place). Each rank of the group
    has as many columns as `x`."""
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
    if call.op.name in NAMED:
        return [(call.op.outputs[0], NAMED[call.op.name])]
    return [(o, o.removesuffix("_raw").removesuffix("_rows")) for o in call.op.outputs]


NAMED = {"lm_head": "lm_head", "predict_head": "lm_head", "join": "join"}
"""The weights of operators whose weight does not have the name of their output."""


def _side(call: Call) -> Tensor:
    """The operator's input. If the input has the columns of the decoder and of a prediction, it is
    the operator's half, unless a gather has selected this half already."""
    x, side = call.input(), call.model.sides.get(call.op.name)
    return x if side is None or x.shape[-1] == call.model.kind.hidden else x[:, side]


def _whole_side(call: Call, dx: Tensor) -> Tensor:
    """The gradient of the whole input, zero in the columns that the operator does not read. Under
    tensor parallelism the reduce-scatter adds these columns."""
    side = call.model.sides.get(call.op.name)
    if side is None or call.model.problem.layout.tp > 1:
        return dx
    whole = dx.new_zeros(dx.shape[0], 2 * dx.shape[1])
    whole[:, side] = dx
    return whole


def _column(call: Call) -> Tensors:
    x, found = _side(call), Tensors()
    adds = call.model.column == 0  # of the ranks whose outputs are summed, one adds the bias
    call = call.opened([name for _, name in _weights(call)])
    for out, name in _weights(call):
        if out in call.wanted:
            made = call.linear(x, name, call.bias(name) if adds else None)
            found[out] = _turned(call, name, _adapted(call, name, made))
    return found


def _drop(call: Call) -> Tensors:
    """An adapter's input with dropout, and the mask of kept elements. The mask depends only on the
    positions of elements, so that a recomputation gives the same mask."""
    x, rate = call.input(), call.model.problem.workload.lora_dropout
    rows, columns = call.rows(call.model.where), torch.arange(x.shape[1], device=x.device)
    keep = arithmetic.kept(rows, columns, rate)
    return dict(zip(call.op.outputs, (x * keep / (1.0 - rate), keep), strict=True))


def _drop_backward(call: Call) -> Tensors:
    keep, rate = call.tensors[call.op.saves[0]], call.model.problem.workload.lora_dropout
    return {call.op.inputs[0]: call.grads[0] * keep / (1.0 - rate)}


def _adapter(call: Call, name: str) -> str:
    """The operator input that holds an adapter's first product, for the linear whose weight has
    this local name; empty without an adapter."""
    target = next((t for t, weight in ADAPTED.items() if weight == name), name)
    low = f"lora_{target}"
    return low if low in call.op.inputs else ""


def _adapted(call: Call, name: str, out: Tensor) -> Tensor:
    low = _adapter(call, name)
    return out + call.linear(call.tensors[low], f"{low}.b", None) if low else out


def _differentiable(call: Call, name: str) -> bool:
    return call.unit.table.activations[name].differentiable


def _low_gradients(call: Call, gradients: Iterable[tuple[str, Tensor]]) -> Tensors:
    found = {
        low: grad @ call.parameter(f"{low}.b").value
        for name, grad in gradients
        if (low := _adapter(call, name)) and _differentiable(call, low)
    }
    return {name: found[name] for name in call.op.inputs if name in found}


def _add_weight_gradient(call: Call, name: str, grad: Tensor) -> None:
    if low := _adapter(call, name):
        arithmetic.add_weight_gradient(call.parameter(f"{low}.b").grad, grad, call.tensors[low])
    if not call.parameter(name).spec.trained:
        return
    totals = call.sums(name)
    for total, some in zip(totals, call.narrowed(grad).chunk(len(totals), 1), strict=True):
        arithmetic.add_weight_gradient(total, some, _side(call))
    if call.bias(name) is not None:
        for total, some in zip(call.sums(f"{name}.bias"), grad.chunk(len(totals), 1), strict=True):
            total.add_(some.sum(0))


def _turned(call: Call, name: str, x: Tensor, *, inverse: bool = False) -> Tensor:
    """x after RoPE if `name` is q or k and their operator rotates it. With norms of queries and
    keys, these norms rotate instead."""
    rotates = name in ("q", "k") and not call.model.kind.qk_norm
    return _rotated(call, x, inverse=inverse) if rotates else x


def _rotated(call: Call, x: Tensor, *, inverse: bool = False) -> Tensor:
    """x after RoPE if the model has it; in latent attention on the last columns of each head."""
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
    """The keys: each head's own columns, followed by the columns that all heads share."""
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
    """Yield (weight, gradient of the operator's output), in the order of the outputs."""
    return ((name, grad) for (_, name), grad in zip(_weights(call), call.grads, strict=True))


def _column_backward(call: Call) -> Tensors:
    """The input gradient. If RoPE has rotated an output, the rotation of its gradient is undone in
    place, because the weight gradient reads this storage next."""
    dx: Tensor | None = None
    x, gradients = call.op.inputs[0], list[tuple[str, Tensor]]()
    if _differentiable(call, x):
        call = call.opened([name for _, name in _weights(call)])
    for name, turned in _column_gradients(call):
        grad = _turned(call, name, turned, inverse=True)
        if call.grads_are_views and grad is not turned:
            turned.copy_(grad)
        gradients.append((name, grad))
        if _differentiable(call, x):
            weight, narrow = call.weight(name), call.narrowed(grad)
            dx = narrow @ weight if dx is None else torch.addmm(dx, narrow, weight)
    return ({} if dx is None else {x: _whole_side(call, dx)}) | _low_gradients(call, gradients)


def _column_weight(call: Call) -> None:
    for name, found in _column_gradients(call):
        back = call.grads_are_views  # `_column_backward` has undone the rotation in place
        grad = found if back else _turned(call, name, found, inverse=True)
        _add_weight_gradient(call, name, grad)


def _row(call: Call) -> Tensors:
    """This rank's part of a sum over ranks; only the first rank adds the bias."""
    bias = call.bias(call.op.name) if call.model.tp_rank == 0 else None
    out = call.linear(call.input(), call.op.name, bias)
    return {call.op.outputs[0]: _adapted(call, call.op.name, out)}


def _row_backward(call: Call) -> Tensors:
    x, dx = call.op.inputs[0], Tensors()
    if _differentiable(call, x):
        dx[x] = call.narrowed(call.grads[0]) @ call.weight(call.op.name)
    return dx | _low_gradients(call, [(call.op.name, call.grads[0])])


def _row_weight(call: Call) -> None:
    _add_weight_gradient(call, call.op.name, call.grads[0])


def _quantise(call: Call) -> Tensors:
    """The quantised copy of a linear's input. A scale of the whole tensor is kept in the model."""
    (out,) = call.op.outputs
    data, call.model.scales[call.scale_key(out)] = quantised.packed(call.input(), call.recipe)
    return {out: data}


# -- pointwise ------------------------------------------------------------------------------------


SUM_PIECES = 16
"""Pieces in which a sum is computed whose result is dropped. A recomputation that ends with the
layer's output computes such a sum, and the ledger has no whole tensor for it."""


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
    if len(call.op.inputs) == 2:  # the activation is fused with the product
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

OPERATORS: dict[str, Operator] = {
    **dict.fromkeys((*NORMS, *HEAD_NORMS), Operator(_norm, _norm_backward)),
    **dict.fromkeys(COLUMNS, Operator(_column, _column_backward, _column_weight)),
    **dict.fromkeys((*ROWS, *ADAPTERS), Operator(_row, _row_backward, _row_weight)),
    **dict.fromkeys(DROPS, Operator(_drop, _drop_backward)),
    **dict.fromkeys(SUMS, Operator(_residual)),
    **dict.fromkeys((f"{name}{QUANTISED}" for name in LINEAR_INPUTS), Operator(_quantise)),
    "k_turn": Operator(_turn, _turn_backward),
    "k_join": Operator(_join, _join_backward),
    "attention": Operator(attention, attention_backward),
    **dict.fromkeys(("act", "shared_act", "memory_mul"), Operator(_act, _act_backward)),
    "mul": Operator(_mul, _mul_backward),
    **ends.OPERATORS,
    **experts.OPERATORS,
    **memory.OPERATORS,
}
