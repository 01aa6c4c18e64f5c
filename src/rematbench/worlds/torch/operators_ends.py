"""The model's ends on one rank: token lookup, and the loss over vocabulary shards."""

import torch
from torch import Tensor

from rematbench.worlds.torch import arithmetic
from rematbench.worlds.torch.calls import Call, Tensors
from rematbench.worlds.torch.groups import Group


def embedding(call: Call) -> Tensors:
    model = call.model
    ids = model.batches[call.span.micro_batch].ids
    table = call.parameter("embedding").value
    out = arithmetic.embed(ids, table, model.vocab_start, whole=model.problem.layout.tp == 1)
    if model.kind.position == "learned" and model.place.tp == 0:  # by one rank of the group
        out = out + call.parameter("position").value[model.where]
    return {"layer_input": out}


def embedding_weight(call: Call) -> None:
    model = call.model
    ids = model.batches[call.span.micro_batch].ids
    total = call.parameter("embedding").grad
    whole = model.problem.layout.tp == 1
    arithmetic.embed_backward(total, call.grads[0], ids, model.vocab_start, whole=whole)
    if model.kind.position == "learned":
        total = call.parameter("position").grad
        total.index_add_(0, model.where, call.grads[0].to(total.dtype))


def loss(call: Call) -> Tensors:
    """A copy of the logits in the loss's dtype, -inf in the padded vocabulary's columns."""
    saved = call.model.dtype_of(call.unit.table.activations["loss_saved"])
    copy = call.only().to(saved, copy=True)
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
