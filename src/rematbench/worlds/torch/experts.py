"""The operators of a mixture of experts on one rank.

The position of a token determines its experts (`RankModel.chosen`), as when a package forces
balance. The router only gives their probabilities: a softmax over the logits of the token's
experts, or their sigmoids divided by their sum. So all sizes are known in advance, no expert waits
for another, and every layout routes a token alike. The loss that balances experts then has no
gradient, because the probabilities of a token add up to 1.

Rows of experts' tensors are ordered by (expert, sending rank, token); before and after an exchange
by (rank, expert of the rank, token). A row of the router's scores, or of the permutation, is a row
of bytes with fields of several types. Bytes that the stack saves beyond these fields stay zero.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rematbench.costs.operators.experts import INDEX
from rematbench.costs.operators.launches import COUNTS
from rematbench.costs.operators.ops import Activation
from rematbench.workload import Experts
from rematbench.worlds.torch import arithmetic
from rematbench.worlds.torch.operands import Call, Operator, Tensors


def experts_of(call: Call) -> Experts:
    experts = call.model.kind.experts
    assert experts is not None
    return experts


def _tensor(call: Call, name: str) -> Activation:
    return call.unit.table.activations[name]


# -- rows of bytes --------------------------------------------------------------------------------


def _empty_rows(call: Call, name: str, rows: int) -> Tensor:
    shape = (rows, _tensor(call, name).row_bytes)
    return torch.zeros(shape, dtype=torch.uint8, device=call.model.device)


def _write(rows: Tensor, first: int, values: Tensor) -> int:
    """Write a field into each row, from byte `first` on; return the number of the byte after it."""
    data = values.contiguous().view(torch.uint8).view(rows.shape[0], -1)
    stop = first + data.shape[1]
    rows[:, first:stop] = data
    return stop


def _field(rows: Tensor, first: int, columns: int, dtype: torch.dtype) -> Tensor:
    return rows[:, first : first + columns * dtype.itemsize].clone().view(dtype)


def _chosen(call: Call, scores: Tensor) -> Tensor:
    return _field(scores, 0, experts_of(call).active, torch.int64)


def _probabilities(call: Call, scores: Tensor) -> Tensor:
    """The probabilities of each token's experts, or their gradients (at the same bytes)."""
    active = experts_of(call).active
    return _field(scores, INDEX * active, active, arithmetic.wide(call.model.dtype))


# -- router ---------------------------------------------------------------------------------------


def route(call: Call) -> Tensors:
    x, chosen = call.input(), call.rows(call.model.chosen)
    logits = call.linear(x, "router", call.bias("router")).to(arithmetic.wide(x.dtype))
    scores = _empty_rows(call, "router_scores", x.shape[0])
    after = _write(scores, 0, chosen)
    if experts_of(call).router == "softmax":
        _write(scores, after, logits.gather(1, chosen).softmax(-1))
        return {"router_scores": scores}
    every = logits.sigmoid_()
    probs = every.gather(1, chosen)
    total = probs.sum(-1, keepdim=True)
    after = _write(scores, after, probs.div_(total))
    _write(scores, _write(scores, after, total), every)
    return {"router_scores": scores}


def _logit_gradients(call: Call) -> Tensor:
    """The gradients of the router's logits, rows x experts, in compute precision."""
    experts, scores = experts_of(call), call.tensors["router_scores"]
    probs, grads = _probabilities(call, scores), _probabilities(call, call.grads[0])
    inner = (probs * grads).sum(-1, keepdim=True)
    own = grads.sub_(inner)
    if experts.router == "softmax":
        own.mul_(probs)
    else:  # probs = s / total with s = sigmoid(logit), so s = probs x total
        first = (INDEX + probs.element_size()) * experts.active
        total = _field(scores, first, 1, probs.dtype)
        own.mul_(probs).mul_(probs.mul(total).neg_().add_(1.0))
    every = torch.zeros(own.shape[0], experts.count, dtype=call.model.dtype, device=own.device)
    return every.scatter_(1, _chosen(call, scores), own.to(call.model.dtype))


def route_backward(call: Call) -> Tensors:
    return {call.op.inputs[0]: _logit_gradients(call) @ call.parameter("router").value}


def route_weight(call: Call) -> None:
    grad = _logit_gradients(call)
    arithmetic.add_weight_gradient(call.parameter("router").grad, grad, call.input())
    if call.bias("router") is not None:
        call.parameter("router.bias").grad.add_(grad.sum(0))


def count(call: Call) -> Tensors:
    """The number of tokens of each expert, once for every rank, because the ranks gather it
    next."""
    chosen = _chosen(call, call.input()).view(-1)
    own = torch.zeros(experts_of(call).count, dtype=torch.int64, device=chosen.device)
    own.index_add_(0, chosen, torch.ones_like(chosen))
    return {COUNTS: own.repeat(_tensor(call, COUNTS).rows, 1)}


# -- order ----------------------------------------------------------------------------------------


def permute(call: Call) -> Tensors:
    """A copy of each token for each of its experts, by expert; probabilities; the permutation."""
    x, scores = call.input(), call.tensors["router_scores"]
    experts, chosen, probs = experts_of(call), _chosen(call, scores), _probabilities(call, scores)
    order = chosen.view(-1).argsort(stable=True)
    saved = _empty_rows(call, "permutation", x.shape[0])
    map_ = torch.zeros(x.shape[0], experts.count, dtype=torch.bool, device=x.device)
    after = _write(saved, 0, map_.scatter_(1, chosen, value=True))
    wide = torch.zeros(map_.shape, dtype=probs.dtype, device=x.device)
    _write(saved, _write(saved, after, wide.scatter_(1, chosen, probs)), order)
    return {
        "permuted": x[order // experts.active],
        "permuted_probs": probs.view(-1)[order][:, None],
        "permutation": saved,
    }


def _order(call: Call) -> Tensor:
    """For each copy of a token, ordered by expert, its index in the order of (token, expert)."""
    saved, experts = call.tensors["permutation"], experts_of(call)
    first = saved.shape[1] - INDEX * experts.active
    return _field(saved, first, experts.active, torch.int64).view(-1)


def _sum_copies(call: Call, copies: Tensor) -> Tensor:
    order = _order(call).div_(experts_of(call).active, rounding_mode="floor")
    rows = call.tensors["permutation"].shape[0]
    return copies.new_zeros(rows, copies.shape[1]).index_add_(0, order, copies)


def permute_backward(call: Call) -> Tensors:
    tokens, probs = call.grads
    active = experts_of(call).active
    scores = _empty_rows(call, "router_scores", call.tensors["permutation"].shape[0])
    own = torch.empty_like(probs).index_copy_(0, _order(call), probs)
    _write(scores, INDEX * active, own.view(-1, active))
    return {call.op.inputs[0]: _sum_copies(call, tokens), "router_scores": scores}


def unpermute(call: Call) -> Tensors:
    return {call.op.outputs[0]: _sum_copies(call, call.input())}


def unpermute_backward(call: Call) -> Tensors:
    order = _order(call).div_(experts_of(call).active, rounding_mode="floor")
    return {call.op.inputs[0]: call.grads[0][order]}


def _turned(x: Tensor, first: int, second: int) -> Tensor:
    """(first second rows) x columns -> (second first rows) x columns, in a new storage."""
    parts = x.view(first, second, -1, x.shape[-1]).transpose(0, 1)
    return parts.clone(memory_format=torch.contiguous_format).view(x.shape)


def _senders(call: Call) -> tuple[int, int]:
    """(number of ranks from which a rank receives tokens, number of its experts)."""
    layout = call.model.problem.layout
    return layout.ep * layout.expert_tp, experts_of(call).count // layout.ep


def _apart(call: Call, whole: Tensor) -> list[Tensor]:
    """Tokens and probabilities as views of the buffer of bytes that has them one after another."""
    parts, first = [], 0
    for name in call.op.outputs:
        tensor, dtype = _tensor(call, name), call.model.dtype_of(_tensor(call, name))
        part = whole[first : first + tensor.nbytes]
        parts.append(part.view(dtype).view(tensor.rows, -1))
        first += tensor.nbytes
    return parts


def sort(call: Call) -> Tensors:
    full = call.tensors.get("full")
    parts = [call.tensors[n] for n in call.op.inputs] if full is None else _apart(call, full)
    senders, experts = _senders(call)
    pairs = zip(call.op.outputs, parts, strict=True)
    return {name: _turned(part, senders, experts) for name, part in pairs}


def sort_backward(call: Call) -> Tensors:
    senders, experts = _senders(call)
    parts = [_turned(grad, experts, senders) for grad in call.grads]
    if call.op.grad_reduce is None:
        return dict(zip(call.op.inputs, parts, strict=True))
    return {"part": torch.cat([part.view(torch.uint8).view(-1) for part in parts])}


def unsort(call: Call) -> Tensors:
    senders, experts = _senders(call)
    return {call.op.outputs[0]: _turned(call.input(), experts, senders)}


def unsort_backward(call: Call) -> Tensors:
    senders, experts = _senders(call)
    return {call.op.inputs[0]: _turned(call.grads[0], senders, experts)}


# -- experts --------------------------------------------------------------------------------------


def _runs(call: Call, rows: int) -> Iterator[tuple[str, slice]]:
    """Yield (beginning of the names of an expert's parameters, rows of the call that the expert
    computes). A call may have only some rows of each of the tensor's blocks (`storages.Value`)."""
    shard, span, held = call.model.shapes.shard_tokens, call.span, call.model.held_experts
    blocks = rows // span.size
    each = blocks * shard // len(held)
    pieces = [(b * shard + span.first, b * shard + span.stop) for b in range(blocks)]
    if span.size == shard:
        pieces = [(0, blocks * shard)]
    at = 0
    for first, stop in pieces:
        for number in range(first // each, -(-stop // each)):
            size = min(stop, (number + 1) * each) - max(first, number * each)
            yield f"expert{held[number]}.", slice(at, at + size)
            at += size


def _halves(call: Call) -> list[str]:
    """The linears of an expert's first GEMM, in the order of its output's columns."""
    return ["gate_out", "up_out"] if call.model.kind.gated else ["up_out"]


def expert_fc1(call: Call) -> Tensors:
    x, names = call.input(), _halves(call)
    width = experts_of(call).ffn // call.model.problem.layout.expert_tp
    out = x.new_empty(x.shape[0], width * len(names))
    for prefix, rows in _runs(call, x.shape[0]):
        for name, half in zip(names, torch.split(out[rows], width, 1), strict=True):
            half.copy_(call.linear(x[rows], prefix + name, None))
    return {call.op.outputs[0]: out}


def expert_fc1_backward(call: Call) -> Tensors:
    (grad,), names = call.grads, _halves(call)
    grads = grad.new_empty(grad.shape[0], call.model.kind.hidden)
    for prefix, rows in _runs(call, grad.shape[0]):
        for name, half in zip(names, grad[rows].chunk(len(names), 1), strict=True):
            weight = call.parameter(prefix + name).value
            if name == names[0]:
                torch.mm(half, weight, out=grads[rows])
            else:
                grads[rows].addmm_(half, weight)
    return {call.op.inputs[0]: grads}


def expert_fc1_weight(call: Call) -> None:
    (grad,), x, names = call.grads, call.input(), _halves(call)
    for prefix, rows in _runs(call, grad.shape[0]):
        for name, half in zip(names, grad[rows].chunk(len(names), 1), strict=True):
            arithmetic.add_weight_gradient(call.parameter(prefix + name).grad, half, x[rows])


def expert_act(call: Call) -> Tensors:
    """The activation, scaled by the token's probability."""
    kind, probs = call.model.kind, call.tensors["expert_probs"]
    gate, *up = call.input().chunk(len(_halves(call)), 1)
    out = arithmetic.activation(gate, kind.mlp)
    for each in up:
        out.mul_(each)
    unweighted = dict.fromkeys(call.op.outputs[1:], out)
    return {call.op.outputs[0]: out * probs if unweighted else out.mul_(probs)} | unweighted


def expert_act_backward(call: Call) -> Tensors:
    kind, x, probs = call.model.kind.mlp, call.input(), call.tensors["expert_probs"]
    (grad,), grads = call.grads, torch.empty_like(x)
    gate, *up = x.chunk(len(_halves(call)), 1)
    own = grads.chunk(len(_halves(call)), 1)
    out = arithmetic.activation(gate, kind)
    scaled = grad.clone().mul_(probs)
    if up:
        own[1].copy_(scaled).mul_(out)
        out.mul_(up[0])
        scaled.mul_(up[0])
    own[0].copy_(arithmetic.activation_backward(scaled, gate, kind))
    weights = out.mul_(grad).sum(-1, keepdim=True, dtype=probs.dtype)
    return {call.op.inputs[0]: grads, "expert_probs": weights}


def expert_fc2(call: Call) -> Tensors:
    x = call.input()
    out = x.new_empty(x.shape[0], call.model.kind.hidden)
    for prefix, rows in _runs(call, x.shape[0]):
        out[rows] = call.linear(x[rows], f"{prefix}fc2", None)
    return {call.op.outputs[0]: out}


def expert_fc2_backward(call: Call) -> Tensors:
    (grad,) = call.grads
    width = experts_of(call).ffn // call.model.problem.layout.expert_tp
    grads = grad.new_empty(grad.shape[0], width)
    for prefix, rows in _runs(call, grad.shape[0]):
        torch.mm(grad[rows], call.parameter(f"{prefix}fc2").value, out=grads[rows])
    return {call.op.inputs[0]: grads}


def expert_fc2_weight(call: Call) -> None:
    (grad,), x = call.grads, call.input()
    for prefix, rows in _runs(call, grad.shape[0]):
        arithmetic.add_weight_gradient(call.parameter(f"{prefix}fc2").grad, grad[rows], x[rows])


OPERATORS = {
    "router": Operator(route, route_backward, route_weight),
    COUNTS: Operator(count),
    "permute": Operator(permute, permute_backward),
    "sort": Operator(sort, sort_backward),
    "expert_fc1": Operator(expert_fc1, expert_fc1_backward, expert_fc1_weight),
    "expert_act": Operator(expert_act, expert_act_backward),
    "expert_fc2": Operator(expert_fc2, expert_fc2_backward, expert_fc2_weight),
    "unsort": Operator(unsort, unsort_backward),
    "unpermute": Operator(unpermute, unpermute_backward),
}
