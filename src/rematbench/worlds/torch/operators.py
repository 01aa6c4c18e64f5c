"""The operators of the plan vocabulary on one rank: names to kernels, parameters and rows."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rematbench.worlds.torch import arithmetic
from rematbench.worlds.torch.calls import Call, Tensors
from rematbench.worlds.torch.operators_attention import attention, attention_backward
from rematbench.worlds.torch.operators_ends import (
    embedding,
    embedding_weight,
    loss,
    loss_backward,
)

Forward = Callable[[Call], Tensors]
Backward = Callable[[Call], Tensors]
Weight = Callable[[Call], None]

COLUMNS = ("qkv", "fc1", "lm_head")
"""The column-parallel operators: each output has its own weight, so that none is a view."""
NORMS = ("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "final_norm")


# -- norms ----------------------------------------------------------------------------------------


def _norm(call: Call) -> Tensors:
    weight, bias = call.parameter(call.op.name).value, call.bias(call.op.name)
    x = call.only()
    if bias is None:
        return {call.op.outputs[0]: arithmetic.rms_norm(x, weight)}
    return {call.op.outputs[0]: arithmetic.layer_norm(x, weight, bias)}


def _norm_backward(call: Call) -> Tensors:
    weight, x = call.parameter(call.op.name), call.only()
    if call.bias(call.op.name) is None:
        dx, dw = arithmetic.rms_norm_backward(call.grads[0], x, weight.value)
    else:
        dx, dw, db = arithmetic.layer_norm_backward(call.grads[0], x, weight.value)
        call.parameter(f"{call.op.name}.bias").grad.add_(db)
    weight.grad.add_(dw)
    return {call.op.inputs[0]: dx}


# -- linears --------------------------------------------------------------------------------------


def _weights(call: Call) -> list[tuple[str, str]]:
    """(output, weight) pairs of a column-parallel operator."""
    if call.op.name == "lm_head":
        return [("logits", "lm_head")]
    return [(out, out.removesuffix("_rows")) for out in call.op.outputs]


def _column(call: Call) -> Tensors:
    x = call.only()
    return {
        out: _rotated(call, name, call.linear(x, name, call.bias(name)))
        for out, name in _weights(call)
        if out in call.wanted
    }


def _rotated(call: Call, name: str, x: Tensor, *, inverse: bool = False) -> Tensor:
    """x after RoPE where the operator rotates `name`: RoPE is a part of the qkv operator."""
    model = call.model
    if name not in ("q", "k") or model.kind.position != "rope":
        return x
    return arithmetic.rope(x, call.rows(model.cos), call.rows(model.sin), inverse=inverse)


def _column_gradients(call: Call) -> Iterator[tuple[str, Tensor]]:
    """(weight, gradient of the operator's output), in the order of the outputs."""
    return ((name, grad) for (_, name), grad in zip(_weights(call), call.grads, strict=True))


def _column_backward(call: Call) -> Tensors:
    """Where RoPE has turned an output, its gradient is turned back in its storage, which the
    weight's gradient reads next."""
    dx: Tensor | None = None
    for name, turned in _column_gradients(call):
        grad = _rotated(call, name, turned, inverse=True)
        if call.grads_are_views and grad is not turned:
            turned.copy_(grad)
        weight = call.parameter(name).value
        dx = grad @ weight if dx is None else torch.addmm(dx, grad, weight)
    assert dx is not None
    return {call.op.inputs[0]: dx}


def _column_weight(call: Call) -> None:
    x = call.only()
    for name, found in _column_gradients(call):
        back = call.grads_are_views  # turned back already
        grad = found if back else _rotated(call, name, found, inverse=True)
        arithmetic.add_weight_gradient(call.parameter(name).grad, grad, x)
        if call.bias(name) is not None:
            call.parameter(f"{name}.bias").grad.add_(grad.sum(0))


def _row(call: Call) -> Tensors:
    """This rank's partial sum; one rank of the group adds the bias."""
    bias = call.bias(call.op.name) if call.model.place.tp == 0 else None
    return {call.op.outputs[0]: call.linear(call.only(), call.op.name, bias)}


def _row_backward(call: Call) -> Tensors:
    return {call.op.inputs[0]: call.grads[0] @ call.parameter(call.op.name).value}


def _row_weight(call: Call) -> None:
    arithmetic.add_weight_gradient(call.parameter(call.op.name).grad, call.grads[0], call.only())
    if call.bias(call.op.name) is not None:
        call.parameter(f"{call.op.name}.bias").grad.add_(call.grads[0].sum(0))


# -- pointwise ------------------------------------------------------------------------------------


UNKEPT_PIECES = 16
"""Pieces in which a sum is made that nobody keeps: recomputation ends with the layer's output, and
a whole tensor for it would be in no ledger."""


def _residual(call: Call) -> Tensors:
    x, skip = (call.tensors[name] for name in call.op.inputs)
    if call.op.outputs[0] in call.wanted:
        return {call.op.outputs[0]: x + skip}
    for rows, beside in zip(x.chunk(UNKEPT_PIECES), skip.chunk(UNKEPT_PIECES), strict=True):
        torch.add(rows, beside)
    return {}


def _act(call: Call) -> Tensors:
    kind = call.model.kind.mlp
    out = arithmetic.activation(call.tensors[call.op.inputs[0]], kind)
    if len(call.op.inputs) == 2:  # fused with the product
        out = out * call.tensors["up_out"]
    return {call.op.outputs[0]: out}


def _act_backward(call: Call) -> Tensors:
    kind, grad, gate = call.model.kind.mlp, call.grads[0], call.tensors[call.op.inputs[0]]
    if len(call.op.inputs) == 1:
        return {call.op.inputs[0]: arithmetic.activation_backward(grad, gate, kind)}
    up = call.tensors["up_out"]
    return {
        "gate_out": arithmetic.activation_backward(grad * up, gate, kind),
        "up_out": grad * arithmetic.activation(gate, kind),
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
    **dict.fromkeys(("proj", "fc2"), _row),
    **dict.fromkeys(("attn_add", "mlp_add"), _residual),
    "attention": attention,
    "act": _act,
    "mul": _mul,
    "embedding": embedding,
    "loss": loss,
}
BACKWARD_INPUT: dict[str, Backward] = {
    **dict.fromkeys(NORMS, _norm_backward),
    **dict.fromkeys(COLUMNS, _column_backward),
    **dict.fromkeys(("proj", "fc2"), _row_backward),
    "attention": attention_backward,
    "act": _act_backward,
    "mul": _mul_backward,
    "loss": loss_backward,
}
BACKWARD_WEIGHT: dict[str, Weight] = {
    **dict.fromkeys(COLUMNS, _column_weight),
    **dict.fromkeys(("proj", "fc2"), _row_weight),
    "embedding": embedding_weight,
}
