"""The operators at the ends of a model on one rank: embedding lookups, losses, and the operators
that join columns for a layer that predicts one more token."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rematbench.worlds.torch import arithmetic
from rematbench.worlds.torch.groups import Group
from rematbench.worlds.torch.operands import Call, Operator, Tensors
from rematbench.worlds.torch.rank_model import SAVED

PREDICTED = 0.1
"""The weight of the prediction layer's loss (megatron-core 0.16.1, mtp_loss_scaling_factor)."""


def embedding(call: Call) -> Tensors:
    model = call.model
    table = call.parameter("embedding").value
    whole = model.problem.layout.tp == 1
    if model.shares:  # each stage has a part of the table
        out = model.looked_up[call.span.micro_batch].clone()
    else:
        out = arithmetic.embed(_ids(call), table, model.vocab_start, whole=whole)
    if _positions(call) and model.tp_rank == 0:  # one rank of the group adds them
        out = out + call.parameter("position").value[call.rows(model.where)]
    return {call.op.outputs[0]: out}


def _ids(call: Call) -> Tensor:
    batch = call.model.batches[call.span.micro_batch]
    return call.rows(batch.ids if call.op.name == "embedding" else batch.ahead[0])


def _positions(call: Call) -> bool:
    """Whether learned positions are added: to the model's input, not to a prediction's."""
    return call.model.kind.position == "learned" and call.op.name == "embedding"


def embedding_weight(call: Call) -> None:
    model = call.model
    ids = _ids(call)
    total = call.parameter("embedding").grad
    whole = model.problem.layout.tp == 1
    if model.shares:
        with _disable_current_modes():  # the ledger does not count transport memory
            model.input_gradients[call.span.micro_batch] = call.grads[0].clone()
    else:
        arithmetic.embed_backward(total, call.grads[0], ids, model.vocab_start, whole=whole)
    if _positions(call):
        total = call.parameter("position").grad
        total.index_add_(0, call.rows(model.where), call.grads[0].to(total.dtype))


def loss(call: Call) -> Tensors:
    """A copy of the logits in the loss's dtype, -inf in the padded vocabulary's columns."""
    name = SAVED[call.op.name]
    saved = call.model.dtype_of(call.unit.table.activations[name])
    copy = call.input().to(saved, copy=True)
    copy[:, max(0, call.model.kind.vocab - call.model.vocab_start) :] = float("-inf")
    return {name: copy}


def _labels(call: Call) -> tuple[Tensor, float]:
    batch = call.model.batches[call.span.micro_batch]
    if call.op.name == "loss":
        return call.rows(batch.labels), 1.0
    return call.rows(batch.ahead[1]), PREDICTED


def finish_loss(call: Call, group: Group) -> Tensor:
    """Turn the logits of a vocabulary shard into softmax over all shards, in place; return the
    weighted sum of the tokens' losses."""
    labels, weight = _labels(call)
    saved = call.tensors[SAVED[call.op.name]]
    _, total, target = softmax(saved, labels, call.model.vocab_start, group)
    losses = (total.log() - target).masked_fill(labels == arithmetic.IGNORED, 0.0)
    return losses.sum() * weight


def softmax(
    saved: Tensor, labels: Tensor, start: int, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn the logits of a vocabulary shard that begins at token `start` into softmax over the
    shards of a group, in place. Return for each token the largest logit, the sum of exponentials,
    and the logit of its label minus the largest (0 if no shard has the label)."""
    top = saved.amax(-1)
    group.all_reduce(top, "max")
    top.clamp_(min=torch.finfo(top.dtype).min)  # a shard may have padded columns only
    saved.sub_(top[:, None])
    column, mine = arithmetic.in_shard(labels, start, saved.shape[-1])
    target = saved.gather(1, column[:, None])[:, 0].masked_fill(~mine, 0.0)
    saved.exp_()
    sums = torch.stack([saved.sum(-1), target])
    group.all_reduce(sums)
    saved.div_(sums[0].clamp(min=torch.finfo(top.dtype).tiny)[:, None])
    return top, sums[0], sums[1]


def loss_backward(call: Call) -> Tensors:
    model = call.model
    batch, (labels, weight) = model.batches[call.span.micro_batch], _labels(call)
    probs, scale = call.tensors[SAVED[call.op.name]], batch.scale * weight
    grad = arithmetic.cross_entropy_backward(probs, labels, model.vocab_start, scale, model.dtype)
    return {call.op.inputs[0]: grad}


def _beside(call: Call) -> Tensors:
    return {call.op.outputs[0]: torch.cat([call.tensors[name] for name in call.op.inputs], -1)}


def _beside_backward(call: Call) -> Tensors:
    parts = call.grads[0].chunk(2, -1)
    return {name: part.clone() for name, part in zip(call.op.inputs, parts, strict=True)}


def _gather_columns(call: Call) -> Tensors:
    """A rank's rows of all columns, from every rank's columns of all rows."""
    tp, place, rows = call.model.problem.layout.tp, call.model.tp_rank, call.span.size
    whole = torch.cat(call.input().chunk(tp), -1)
    return {call.op.outputs[0]: whole[place * rows : (place + 1) * rows].clone()}


def _gather_columns_backward(call: Call) -> Tensors:
    own = call.grads[0].chunk(call.model.problem.layout.tp, -1)[call.model.tp_rank]
    return {call.op.inputs[0]: own.contiguous()}


OPERATORS = {
    **dict.fromkeys(("embedding", "next_embedding"), Operator(embedding, weight=embedding_weight)),
    **dict.fromkeys(("join_cat", "hand_on"), Operator(_beside, _beside_backward)),
    "join_gather": Operator(_gather_columns, _gather_columns_backward),
    **dict.fromkeys(SAVED, Operator(loss, loss_backward)),
}
