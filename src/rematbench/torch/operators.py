"""Operators of the plan vocabulary on one rank: names to kernels, parameters and rows."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rematbench.chunk_ops import Unit
from rematbench.ops import Op
from rematbench.torch import attention as attn
from rematbench.torch import kernels
from rematbench.torch.groups import Group
from rematbench.torch.memory import Site
from rematbench.torch.model import RankModel
from rematbench.torch.parameters import Parameter

Tensors = dict[str, Tensor]


class Call(NamedTuple):
    """One operator at work: where, its tensors by activation name, the gradients of its outputs in
    order, and which outputs are wanted."""

    model: RankModel
    unit: Unit
    op: Op
    site: Site
    tensors: Tensors
    grads: tuple[Tensor, ...] = ()
    wanted: frozenset[str] = frozenset()

    def parameter(self, name: str) -> Parameter:
        """A parameter of the operator's unit."""
        return self.model.local[self.site.chunk][self.unit.prefix][name]

    def bias(self, name: str) -> Tensor | None:
        """A bias, if the model has it."""
        found = self.model.local[self.site.chunk][self.unit.prefix].get(f"{name}.bias")
        return None if found is None else found.value

    def rows(self, whole: Tensor) -> Tensor:
        """The call's rows of something that has one row per token of the rank."""
        shard = self.model.shapes.shard_tokens
        if self.site.size == shard:
            return whole
        blocks = whole.view(whole.shape[0] // shard, shard, *whole.shape[1:])
        return blocks[:, self.site.first : self.site.stop].reshape(-1, *whole.shape[1:])

    def only(self) -> Tensor:
        """The single input."""
        return self.tensors[self.op.inputs[0]]

    def linear(self, x: Tensor, name: str, bias: Tensor | None) -> Tensor:
        """x times a weight, its work counted."""
        weight = self.parameter(name).value
        self.model.flop += 2.0 * x.shape[0] * weight.numel()
        return kernels.linear(x, weight, bias)


Forward = Callable[[Call], Tensors]
Backward = Callable[[Call], Tensors]
Weight = Callable[[Call], None]

COLUMNS = ("qkv", "fc1", "lm_head")
"""The column-parallel operators: one weight for each output, so that no output is a view."""
NORMS = ("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "final_norm")


# -- norms ----------------------------------------------------------------------------------------


def _norm(call: Call) -> Tensors:
    weight, bias = call.parameter(call.op.name).value, call.bias(call.op.name)
    x = call.only()
    if bias is None:
        return {call.op.outputs[0]: kernels.rms_norm(x, weight)}
    return {call.op.outputs[0]: kernels.layer_norm(x, weight, bias)}


def _norm_backward(call: Call) -> Tensors:
    weight, x = call.parameter(call.op.name), call.only()
    if call.bias(call.op.name) is None:
        dx, dw = kernels.rms_norm_backward(call.grads[0], x, weight.value)
    else:
        dx, dw, db = kernels.layer_norm_backward(call.grads[0], x, weight.value)
        call.parameter(f"{call.op.name}.bias").grad.add_(db)
    weight.grad.add_(dw)
    return {call.op.inputs[0]: dx}


# -- linears --------------------------------------------------------------------------------------


def _weights(call: Call) -> list[tuple[str, str]]:
    """(output, weight) pairs of a column-parallel operator."""
    if call.op.name == "lm_head":
        return [("logits", "lm_head")]
    return [(out, out) for out in call.op.outputs]


def _column(call: Call) -> Tensors:
    x = call.only()
    return {
        out: _rotated(call, out, call.linear(x, name, call.bias(name)))
        for out, name in _weights(call)
        if out in call.wanted
    }


def _rotated(call: Call, out: str, x: Tensor, *, inverse: bool = False) -> Tensor:
    """RoPE is a part of the qkv operator."""
    model = call.model
    if out not in ("q", "k") or model.kind.position != "rope":
        return x
    return kernels.rope(x, call.rows(model.cos), call.rows(model.sin), inverse=inverse)


def _column_gradients(call: Call) -> list[tuple[str, Tensor]]:
    """(weight, gradient of its product)."""
    pairs = zip(_weights(call), call.grads, strict=True)
    return [(name, _rotated(call, out, g, inverse=True)) for (out, name), g in pairs]


def _column_backward(call: Call) -> Tensors:
    dx: Tensor | None = None
    for name, grad in _column_gradients(call):
        weight = call.parameter(name).value
        dx = grad @ weight if dx is None else torch.addmm(dx, grad, weight)
    assert dx is not None
    return {call.op.inputs[0]: dx}


def _column_weight(call: Call) -> None:
    x = call.only()
    for name, grad in _column_gradients(call):
        kernels.add_weight_gradient(call.parameter(name).grad, grad, x)
        if call.bias(name) is not None:
            call.parameter(f"{name}.bias").grad.add_(grad.sum(0))


def _row(call: Call) -> Tensors:
    """A partial sum; one rank of the group adds the bias."""
    bias = call.bias(call.op.name) if call.model.place.tp == 0 else None
    return {call.op.outputs[0]: call.linear(call.only(), call.op.name, bias)}


def _row_backward(call: Call) -> Tensors:
    return {call.op.inputs[0]: call.grads[0] @ call.parameter(call.op.name).value}


def _row_weight(call: Call) -> None:
    kernels.add_weight_gradient(call.parameter(call.op.name).grad, call.grads[0], call.only())
    if call.bias(call.op.name) is not None:
        call.parameter(f"{call.op.name}.bias").grad.add_(call.grads[0].sum(0))


# -- attention ------------------------------------------------------------------------------------


def _heads(call: Call, x: Tensor, heads: int) -> Tensor:
    """rows x columns -> batch x heads x rows x head_dim."""
    shape = call.model.attention
    return x.view(shape.batch, -1, heads, shape.head_dim).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    """batch x heads x rows (x head_dim) -> rows x columns."""
    y = x.transpose(1, 2)
    return y.reshape(y.shape[0] * y.shape[1], -1)


def gathered_order(call: Call) -> Tensor | None:
    """Where each position of a sequence lies in the ranks' rows one after another."""
    lay = call.model.problem.layout
    if lay.cp == 1:
        return None
    ends = [(r, 2 * lay.cp - 1 - r) for r in range(lay.cp)]
    at = {position: 2 * r + i for r, pair in enumerate(ends) for i, position in enumerate(pair)}
    return torch.tensor([at[i] for i in range(2 * lay.cp)], device=call.model.device)


def _whole_kv(call: Call, name: str) -> Tensor:
    """Keys or values of whole sequences, in order of position."""
    shape, order = call.model.attention, gathered_order(call)
    if order is None:
        return _heads(call, call.tensors[name], shape.kv_heads)
    full = call.tensors["full"].view(2, -1)[0 if name == "k" else 1]
    cp = call.model.problem.layout.cp
    by_slice = full.view(cp, shape.batch, 2, -1, shape.kv_heads, shape.head_dim)
    by_slice = by_slice.permute(1, 0, 2, 3, 4, 5).reshape(
        shape.batch, 2 * cp, -1, shape.kv_heads, shape.head_dim
    )
    return by_slice[:, order].flatten(1, 2).transpose(1, 2)


def _to_ranks(call: Call, grad: Tensor) -> Tensor:
    """A gradient of whole keys or values, in the ranks' rows one after another."""
    shape, order = call.model.attention, gathered_order(call)
    assert order is not None
    cp = call.model.problem.layout.cp
    parts = grad.transpose(1, 2).reshape(shape.batch, 2 * cp, -1)
    back = torch.empty_like(parts)
    back[:, order] = parts
    return back.view(shape.batch, cp, -1).transpose(0, 1).reshape(-1)


def _attention(call: Call) -> Tensors:
    shape, model = call.model.attention, call.model
    q = _heads(call, call.tensors["q"], shape.heads)
    k, v = _whole_kv(call, "k"), _whole_kv(call, "v")
    pairs = sum((b.q1 - b.q0) * (b.k1 - b.k0) / (1 + b.causal)
                for g in attn.blocks(shape.rows, model.slices) for b in g)  # fmt: skip
    model.flop += 4.0 * pairs * shape.heads * shape.head_dim * shape.batch
    if "attn_probs" in call.op.outputs:
        probs = attn.probabilities(q, k)
        out = probs @ attn.repeat(v, shape.heads)
        return {"attn_out": _flat(out), "attn_probs": probs.view(shape.batch * shape.rows, -1)}
    out, lse = attn.attend(q, k, v, model.slices)
    return {"attn_out": _flat(out), "lse": _flat(lse)}


def _attention_backward(call: Call) -> Tensors:
    shape = call.model.attention
    grad = _heads(call, call.grads[0], shape.heads)
    q = _heads(call, call.tensors["q"], shape.heads)
    k, v = _whole_kv(call, "k"), _whole_kv(call, "v")
    if "attn_probs" in call.op.outputs:
        probs = call.tensors["attn_probs"].view(shape.batch, shape.heads, shape.rows, -1)
        dq, dk, dv = attn.unfused_backward(grad, q, k, v, probs)
        return {"q": _flat(dq), "k": _flat(dk), "v": _flat(dv)}
    out = _heads(call, call.tensors["attn_out"], shape.heads)
    lse = call.tensors["lse"].view(shape.batch, -1, shape.heads).transpose(1, 2)
    dq, dk, dv = attn.attend_backward(grad, q, k, v, out, lse, call.model.slices)
    if "full" in call.tensors:
        return {"q": _flat(dq), "part": torch.cat([_to_ranks(call, dk), _to_ranks(call, dv)])}
    return {"q": _flat(dq), "k": _flat(dk), "v": _flat(dv)}


# -- pointwise ------------------------------------------------------------------------------------


def _residual(call: Call) -> Tensors:
    x, skip = (call.tensors[name] for name in call.op.inputs)
    return {call.op.outputs[0]: x + skip}


def _act(call: Call) -> Tensors:
    kind = call.model.kind.mlp
    out = kernels.activation(call.tensors[call.op.inputs[0]], kind)
    if len(call.op.inputs) == 2:  # fused with the product
        out = out * call.tensors["up_out"]
    return {call.op.outputs[0]: out}


def _act_backward(call: Call) -> Tensors:
    kind, grad, gate = call.model.kind.mlp, call.grads[0], call.tensors[call.op.inputs[0]]
    if len(call.op.inputs) == 1:
        return {call.op.inputs[0]: kernels.activation_backward(grad, gate, kind)}
    up = call.tensors["up_out"]
    return {
        "gate_out": kernels.activation_backward(grad * up, gate, kind),
        "up_out": grad * kernels.activation(gate, kind),
    }


def _mul(call: Call) -> Tensors:
    return {"fc2_in": call.tensors["act_out"] * call.tensors["up_out"]}


def _mul_backward(call: Call) -> Tensors:
    grad = call.grads[0]
    return {"act_out": grad * call.tensors["up_out"], "up_out": grad * call.tensors["act_out"]}


# -- ends -----------------------------------------------------------------------------------------


def _embedding(call: Call) -> Tensors:
    model = call.model
    ids = model.batches[call.site.micro_batch].ids
    out = kernels.embed(ids, call.parameter("embedding").value, model.vocab_start)
    if model.kind.position == "learned" and model.place.tp == 0:  # one rank of the group adds it
        out = out + call.parameter("position").value[model.where]
    return {"layer_input": out}


def _embedding_weight(call: Call) -> None:
    model = call.model
    ids = model.batches[call.site.micro_batch].ids
    total = call.parameter("embedding").grad
    kernels.embed_backward(total, call.grads[0], ids, model.vocab_start)
    if model.kind.position == "learned":
        total = call.parameter("position").grad
        total.index_add_(0, model.where, call.grads[0].to(total.dtype))


def _loss(call: Call) -> Tensors:
    """A copy of the logits in the loss's dtype, columns of the padded vocabulary left out."""
    saved = call.model.dtype_of(call.unit.table.activations["loss_saved"])
    copy = call.only().to(saved, copy=True)
    copy[:, max(0, call.model.kind.vocab - call.model.vocab_start) :] = float("-inf")
    return {"loss_saved": copy}


def finish_loss(call: Call, group: Group) -> Tensor:
    """Logits -> softmax in place, over the vocabulary shards; the sum of the rows' losses."""
    model, saved = call.model, call.tensors["loss_saved"]
    labels = call.rows(model.batches[call.site.micro_batch].labels)
    top = saved.amax(-1)
    group.all_reduce(top, "max")
    saved.sub_(top[:, None])
    column, mine = kernels.shard_labels(labels, model.vocab_start, saved.shape[-1])
    target = saved.gather(1, column[:, None])[:, 0].masked_fill(~mine, 0.0)
    saved.exp_()
    sums = torch.stack([saved.sum(-1), target])
    group.all_reduce(sums)
    saved.div_(sums[0][:, None])
    return (sums[0].log() - sums[1]).masked_fill(labels == kernels.IGNORED, 0.0).sum()


def _loss_backward(call: Call) -> Tensors:
    model = call.model
    batch = model.batches[call.site.micro_batch]
    probs, labels = call.tensors["loss_saved"], call.rows(batch.labels)
    first = model.vocab_start
    return {
        "logits": kernels.cross_entropy_backward(probs, labels, first, batch.scale, model.dtype)
    }


FORWARD: dict[str, Forward] = {
    **dict.fromkeys(NORMS, _norm),
    **dict.fromkeys(COLUMNS, _column),
    **dict.fromkeys(("proj", "fc2"), _row),
    **dict.fromkeys(("attn_add", "mlp_add"), _residual),
    "attention": _attention,
    "act": _act,
    "mul": _mul,
    "embedding": _embedding,
    "loss": _loss,
}
BACKWARD_INPUT: dict[str, Backward] = {
    **dict.fromkeys(NORMS, _norm_backward),
    **dict.fromkeys(COLUMNS, _column_backward),
    **dict.fromkeys(("proj", "fc2"), _row_backward),
    "attention": _attention_backward,
    "act": _act_backward,
    "mul": _mul_backward,
    "loss": _loss_backward,
}
BACKWARD_WEIGHT: dict[str, Weight] = {
    **dict.fromkeys(COLUMNS, _column_weight),
    **dict.fromkeys(("proj", "fc2"), _row_weight),
    "embedding": _embedding_weight,
}
