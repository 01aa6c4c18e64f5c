"""The operators of memory layers on one rank: product keys, and a lookup in a table of values."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rematbench.model import Memory
from rematbench.worlds.torch.operands import Call, Operator, Tensors


def _given(call: Call) -> Memory:
    assert call.model.kind.memory is not None
    return call.model.kind.memory


def _sub_keys(call: Call, values: Tensor) -> Tensor:
    """Keys, or their gradients, as heads x halves x keys x columns of a half."""
    return values.view(_given(call).heads, 2, _given(call).keys, -1)


def _memory_keys(call: Call) -> Tensors:
    """The chosen rows of the table, those with the largest sums of two sub-keys' scores, and the
    softmax of these sums."""
    given, keys = _given(call), _sub_keys(call, call.parameter("memory_keys").value)
    query = call.input().view(-1, given.heads, 2, keys.shape[-1])
    scores, at = torch.einsum("thsd,hsnd->thsn", query, keys).topk(given.top)
    sums = (scores[:, :, 0, :, None] + scores[:, :, 1, None, :]).flatten(-2)
    best, pair = sums.topk(given.top)
    first = at[:, :, 0].gather(-1, pair // given.top)
    rows = first * given.keys + at[:, :, 1].gather(-1, pair % given.top)
    return {"memory_rows": rows.flatten(1), "memory_weights": best.softmax(-1).flatten(1)}


def _chosen_keys(call: Call) -> tuple[tuple[Tensor, int, Tensor], ...]:
    """For each half of the keys: the indices (head, half, sub-key) of the chosen rows."""
    given, rows = _given(call), call.tensors["memory_rows"]
    by_head = rows.view(rows.shape[0], given.heads, -1)
    heads = torch.arange(given.heads, device=rows.device)[None, :, None].expand_as(by_head)
    return (heads, 0, by_head // given.keys), (heads, 1, by_head % given.keys)


def _score_gradients(call: Call) -> Tensor:
    """The gradients of the scores of chosen rows, tokens x heads x rows."""
    shape = (-1, _given(call).heads, _given(call).top)
    w, grad = (each.view(shape) for each in (call.tensors["memory_weights"], call.grads[0]))
    return w * (grad - (w * grad).sum(-1, keepdim=True))


def _memory_keys_backward(call: Call) -> Tensors:
    keys, grad = _sub_keys(call, call.parameter("memory_keys").value), _score_gradients(call)
    parts = [torch.einsum("thk,thkd->thd", grad, keys[at]) for at in _chosen_keys(call)]
    return {"memory_query": torch.stack(parts, 2).flatten(1)}


def _memory_keys_weight(call: Call) -> None:
    total, grad = _sub_keys(call, call.parameter("memory_keys").grad), _score_gradients(call)
    query = call.tensors["memory_query"].view(*grad.shape[:2], 2, -1)
    for half, at in enumerate(_chosen_keys(call)):
        where = (at[0], torch.full_like(at[0], half), at[2])
        added = grad[..., None] * query[:, :, half, None, :]
        total.index_put_(where, added.to(total.dtype), accumulate=True)


def _lookup(call: Call) -> Tensors:
    weights, rows = (call.tensors[name] for name in call.op.inputs)
    table = call.parameter("memory_values").value
    return {"memory_bag": F.embedding_bag(rows, table, per_sample_weights=weights, mode="sum")}


def _lookup_backward(call: Call) -> Tensors:
    rows, table = call.tensors["memory_rows"], call.parameter("memory_values").value
    return {"memory_weights": torch.einsum("tkh,th->tk", table[rows], call.grads[0])}


def _lookup_weight(call: Call) -> None:
    total, weights = call.parameter("memory_values").grad, call.tensors["memory_weights"]
    added = weights[..., None] * call.grads[0][:, None, :]
    total.index_add_(0, call.tensors["memory_rows"].flatten(), added.flatten(0, 1).to(total.dtype))


OPERATORS = {
    "memory_keys": Operator(_memory_keys, _memory_keys_backward, _memory_keys_weight),
    "lookup": Operator(_lookup, _lookup_backward, _lookup_weight),
}
