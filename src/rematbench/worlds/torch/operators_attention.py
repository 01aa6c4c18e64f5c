"""Attention on one rank, forward and backward: from rows to heads, and whole keys and values."""

import torch
from torch import Tensor

from rematbench.worlds.torch import attention_backends as attn
from rematbench.worlds.torch.calls import Call, Tensors
from rematbench.worlds.torch.ulysses import by_rank, whole_sequences


def _heads(call: Call, x: Tensor, heads: int) -> Tensor:
    """rows x columns -> batch x heads x rows x head_dim."""
    shape, ranks = call.model.attention, call.model.problem.layout.ulysses
    if ranks > 1:
        x = whole_sequences(x, ranks, shape.batch)
    return x.view(shape.batch, -1, heads, shape.head_dim).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    """batch x heads x rows (x head_dim) -> rows x columns."""
    y = x.transpose(1, 2)
    return y.reshape(y.shape[0] * y.shape[1], -1)


def _columns(call: Call, x: Tensor) -> Tensor:
    """batch x heads x rows x head_dim -> rows x columns, ordered by rank under Ulysses."""
    ranks, batch = call.model.problem.layout.ulysses, call.model.attention.batch
    return by_rank(_flat(x), ranks, batch) if ranks > 1 else _flat(x)


def gathered_order(call: Call) -> list[int]:
    """For each slice of a sequence, its index among the slices that the ranks hold one after
    another. The indices are numbers for views: an index tensor would be a blocking copy to a GPU in
    every call."""
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
    full = call.tensors["full"].view(2, -1)[0 if name == "k" else 1]
    by_slice = full.view(cp, shape.batch, 2, -1, shape.kv_heads, shape.head_dim)
    by_slice = by_slice.permute(1, 0, 2, 3, 4, 5).reshape(
        shape.batch, 2 * cp, -1, shape.kv_heads, shape.head_dim
    )
    return _in_order(by_slice, gathered_order(call)).flatten(1, 2).transpose(1, 2)


def _to_ranks(call: Call, grad: Tensor) -> Tensor:
    """The gradient of whole keys or values, as the ranks' rows one after another."""
    shape, cp = call.model.attention, call.model.problem.layout.cp
    parts = grad.transpose(1, 2).reshape(shape.batch, 2 * cp, -1)
    positions = sorted(range(2 * cp), key=gathered_order(call).__getitem__)
    back = _in_order(parts, positions)
    return back.view(shape.batch, cp, -1).transpose(0, 1).reshape(-1)


def attention(call: Call) -> Tensors:
    shape, model = call.model.attention, call.model
    q = _heads(call, call.tensors["q"], shape.heads)
    k, v = _whole_kv(call, "k"), _whole_kv(call, "v")
    pairs = sum((b.q1 - b.q0) * (b.k1 - b.k0) / (1 + b.causal)
                for g in attn.blocks(shape.rows, model.slices) for b in g)  # fmt: skip
    model.flop += 4.0 * pairs * shape.heads * shape.head_dim * shape.batch
    if "attn_probs" in call.op.outputs:
        probs = attn.probabilities(q, k)
        out = probs @ attn.repeat(v, shape.heads)
        probs = probs.view(shape.batch * shape.rows, -1)
        return {call.op.outputs[0]: _columns(call, out), "attn_probs": probs}
    out, lse = attn.attend(q, k, v, model.slices)
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
    dq, dk, dv = attn.attend_backward(grad, q, k, v, out, lse, call.model.slices)
    if "full" in call.tensors:
        return {"q": _flat(dq), "part": torch.cat([_to_ranks(call, dk), _to_ranks(call, dv)])}
    return {"q": _columns(call, dq), "k": _columns(call, dk), "v": _columns(call, dv)}
