"""The passes that one stage runs for a vocabulary that all stages share. The lowering's module of
the same name gives their order.

Stages reach the barriers of several micro-batches in different orders, which the collectives of one
communicator do not allow. So every stage sends its part of a barrier to every other stage, and each
stage adds the parts itself. The parts are in the memory of the transport, which the ledger does not
count. So are the rows of the input table: before the first pass the rows of all micro-batches are
summed over the stages, and after the last pass their gradients are, so that a lookup inside a pass
moves nothing.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rematbench.engine.program.action import COMPUTE, Action, Kind
from rematbench.engine.program.storage import HEAD, SHARE, storage_of
from rematbench.worlds.torch import arithmetic, ends
from rematbench.worlds.torch.exchanges import Messages
from rematbench.worlds.torch.groups import Group
from rematbench.worlds.torch.operands import Call
from rematbench.worlds.torch.parameters import Parameter
from rematbench.worlds.torch.rank_model import NotExecutable
from rematbench.worlds.torch.storages import Span, Value, compact

Act = Callable[[Action, Span], None]
ALONE = Group(1, 0, None)
BARRIERS = "sg"
VECTORS = 3
"""Vectors over the tokens: the largest logit, the sum of exponentials, the label's logit."""


class SharedVocabulary:
    """`outside` makes the tracker leave out a tensor; the last stage adds losses to `loss`."""

    def __init__(self, messages: Messages, outside: Callable[[Tensor], None], loss: Tensor) -> None:
        self.model, self.memory, self.streams = messages.model, messages.memory, messages.streams
        self.messages, self.outside, self.loss = messages, outside, loss
        self.stage, self.stages = self.model.place.pp, self.model.problem.layout.pp
        group = messages.groups.by_name.get("pp")
        if group is None:
            raise NotExecutable("a stage cannot run alone if stages share the vocabulary")
        self.sum = group.all_reduce
        self.vectors: dict[int, Tensor] = {}
        self.parts: dict[tuple[str, int], dict[int, Tensor]] = {}
        self.work: dict[tuple[Kind, str], Act] = {
            (Kind.FORWARD, "lm_head"): self.logits,
            (Kind.FORWARD, "loss"): self.softmax,
            (Kind.BACKWARD_INPUT, "lm_head"): self.output_gradient,
            (Kind.BACKWARD_INPUT, "loss"): self.logit_gradient,
            (Kind.BACKWARD_WEIGHT, "lm_head"): self.weight_gradient,
            (Kind.ALL_REDUCE, "vocabulary"): self.add_parts,
        }

    def over(self, table: dict[Kind, Act]) -> dict[Kind, Act]:
        """The executor's table, with functions of this class for actions of the vocabulary."""
        return {kind: partial(self._act, usual) for kind, usual in table.items()}

    def _act(self, usual: Act, action: Action, span: Span) -> None:
        if action.part == SHARE or action.op == "vocabulary":
            if action.op != "lookup":  # look_up handles all micro-batches together
                self.work[action.kind, action.op](action, span)
        elif action.kind in (Kind.SEND, Kind.RECV) and action.op[0] in BARRIERS:
            (self.send_part if action.kind is Kind.SEND else self.receive_part)(action, span)
        else:
            usual(action, span)

    # -- the ends of the model --------------------------------------------------------------------

    def look_up(self) -> None:
        """Look up the input rows of all micro-batches, before the first pass: each stage looks up
        the tokens in its part of the table, and the rows are summed over stages."""
        table, first = self._parameter("embedding").value, self.model.vocab_start
        rows = [arithmetic.embed(b.ids, table, first, whole=False) for b in self.model.batches]
        every = torch.stack(rows)
        self.sum(every)
        self.model.looked_up = [*every] if self.stage == 0 else []

    def spread_gradients(self) -> None:
        """Sum the gradients of the input rows over stages, and add them to the gradients of each
        stage's part of the table."""
        table, batches = self._parameter("embedding"), self.model.batches
        found = self.model.input_gradients
        shape = (len(batches), self.model.shapes.tokens, self.model.kind.hidden)
        every = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)
        self.outside(every)
        for micro_batch, gradient in found.items():
            every[micro_batch] = gradient
        found.clear()
        self.sum(every)
        first = self.model.vocab_start
        for batch, gradient in zip(batches, every, strict=True):
            arithmetic.embed_backward(table.grad, gradient, batch.ids, first, whole=False)

    # -- kernels ----------------------------------------------------------------------------------

    def _parameter(self, name: str) -> Parameter:
        return self.model.local[0][SHARE][name]

    def _call(self, action: Action, span: Span, name: str) -> Call:
        """The call of an operator whose first read holds the activation `name`."""
        unit = self.model.units[0][SHARE]
        tensors = {name: self.memory[span.key(action.reads[0])].data}
        return Call(self.model, unit, unit.table.op(action.op), span, tensors)

    def _put(self, action: Action, span: Span, made: Tensor) -> None:
        rows = Value(compact(made), span.first, span.size)
        self.memory.put(span.key(action.allocs[0].storage), rows)

    def logits(self, action: Action, span: Span) -> None:
        call = self._call(action, span, "x")
        self._put(action, span, call.linear(call.tensors["x"], "lm_head", None))

    def softmax(self, action: Action, span: Span) -> None:
        """The softmax over this stage's logits, and the vectors by which all stages correct it."""
        call = self._call(action, span, "logits")
        (saved,) = ends.loss(call).values()
        labels, (_, mine) = self.model.batches[span.micro_batch].labels, self._labels(span)
        top, total, target = ends.softmax(saved, labels, self.model.vocab_start, ALONE)
        self.vectors[span.micro_batch] = torch.stack([top, total, (target + top) * mine])
        self.outside(self.vectors[span.micro_batch])
        self._put(action, span, saved)

    def _labels(self, span: Span) -> tuple[Tensor, Tensor]:
        """(row of each label in this stage's part of the table, whether the part has the label)."""
        labels = self.model.batches[span.micro_batch].labels
        width = self._parameter("lm_head").value.shape[0]
        return arithmetic.in_shard(labels, self.model.vocab_start, width)

    def output_gradient(self, action: Action, span: Span) -> None:
        """This stage's part of the output's gradient: from the gradient of its logits or, if the
        softmax is not yet corrected, from its softmax."""
        call = self._call(action, span, "gradient")
        weight = call.weight("lm_head")
        self._put(action, span, call.tensors["gradient"].to(weight.dtype) @ weight)

    def logit_gradient(self, action: Action, span: Span) -> None:
        call = self._call(action, span, "loss_saved")
        top, total, factors = self._corrections(span)
        call.tensors["loss_saved"].mul_(factors[self.stage][:, None])
        self._put(action, span, ends.loss_backward(call)[call.op.inputs[0]])
        if self.stage == self.stages - 1:
            labels = self._vectors(span)[:, 2].sum(0)
            losses = (total.log() + top - labels).masked_fill(self._ignored(span), 0.0)
            self.loss.add_(losses.sum())
        del self.parts["s", span.micro_batch], self.vectors[span.micro_batch]

    def weight_gradient(self, action: Action, span: Span) -> None:
        gradient, x = (self.memory[span.key(storage)].data for storage in action.reads)
        arithmetic.add_weight_gradient(self._parameter("lm_head").grad, gradient, x)

    # -- barriers ---------------------------------------------------------------------------------

    def _vectors(self, span: Span) -> Tensor:
        """The vectors of all stages: stages x VECTORS x tokens."""
        parts = self.parts["s", span.micro_batch]
        rows = [parts[stage][: VECTORS * span.size] for stage in range(self.stages)]
        return torch.stack(rows).view(self.stages, VECTORS, -1)

    def _corrections(self, span: Span) -> tuple[Tensor, Tensor, Tensor]:
        """For each token the largest logit and the sum of exponentials over all stages, and the
        factor that turns each stage's softmax into its part of the whole softmax."""
        tops, totals, _ = self._vectors(span).unbind(1)
        top = tops.amax(0)
        totals = totals * (tops - top).exp()
        total = totals.sum(0)
        return top, total, totals / total

    def _ignored(self, span: Span) -> Tensor:
        return self.model.batches[span.micro_batch].labels == arithmetic.IGNORED

    def _part(self, barrier: str, span: Span) -> Tensor:
        """What this stage sends at a barrier: its vectors, or its part of the output's gradient. If
        there is a single barrier, it sends both, and also the weights of its labels, because the
        factors of the softmax do not apply to them."""
        last = self.stage == self.stages - 1
        output = storage_of(HEAD if last else SHARE, "final_norm_out").gradient
        found = [self.vectors[span.micro_batch]] if barrier == "s" else []
        if barrier == "g" or span.key(output) in self.memory.values:
            found.append(self.memory[span.key(output)].data)
        if len(found) == 2:
            column, mine = self._labels(span)
            found.append(self._parameter("lm_head").value[column] * mine[:, None])
        wide = arithmetic.wide(self.model.dtype)
        return torch.cat([part.flatten().to(wide) for part in found])

    def send_part(self, action: Action, span: Span) -> None:
        barrier = action.op[0]
        parts = self.parts.setdefault((barrier, span.micro_batch), {})
        if self.stage not in parts:
            parts[self.stage] = self._part(barrier, span)
            self._lend(parts[self.stage])
        self.messages.post(parts[self.stage], self.messages.message_of(action, span))

    def receive_part(self, action: Action, span: Span) -> None:
        own = self.parts[action.op, span.micro_batch]
        data = torch.empty_like(own[self.stage])
        self._lend(data)
        found = self.messages.message_of(action, span)
        self.messages.receive_into(data, found)
        own[found.channel.sender] = data

    def _lend(self, part: Tensor) -> None:
        """Tell the tracker that a part belongs to the transport, and the allocator that compute and
        the barriers read it."""
        self.outside(part)
        for reader in (COMPUTE, "dp"):
            self.streams.share("pp_recv", part, reader)

    def add_parts(self, action: Action, span: Span) -> None:
        """Sum the stages' parts of the output's gradient; if there is a single barrier, first
        correct the softmax in each part. An action without reads only exchanges vectors, which a
        later pass reads."""
        if not action.reads:
            return
        output = self.memory[span.key(action.reads[0])].data
        parts = self.parts.pop(("g", span.micro_batch), None)
        if parts is not None:
            every = torch.stack([parts[n] for n in range(self.stages)])
            output.copy_(every.sum(0).view(output.shape))
            return
        _, _, factors = self._corrections(span)
        parts, total = self.parts["s", span.micro_batch], torch.zeros_like(output)
        for stage in range(self.stages):
            gradient, labels = parts[stage][VECTORS * span.size :].view(2, *output.shape)
            total = total + gradient * factors[stage][:, None] - labels
        scale = self.model.batches[span.micro_batch].scale
        output.copy_((total * scale).masked_fill(self._ignored(span)[:, None], 0.0))
