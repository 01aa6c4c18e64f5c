"""One call of an operator on one rank: its tensors, its rows, its parameters."""

from collections.abc import Container
from typing import NamedTuple

from torch import Tensor

from rematbench.costs.operators.ops import Op
from rematbench.engine.lowering.chunk_ops import Unit
from rematbench.worlds.torch import arithmetic
from rematbench.worlds.torch.model import RankModel
from rematbench.worlds.torch.parameters import Parameter
from rematbench.worlds.torch.storages import Span

Tensors = dict[str, Tensor]


class Call(NamedTuple):
    """One call of an operator. It has a span, the tensors by activation name, the gradients of the
    outputs in order, and the names of the wanted outputs. `grads_are_views`: of their storages, so
    that what is written into them lasts."""

    model: RankModel
    unit: Unit
    op: Op
    span: Span
    tensors: Tensors
    grads: tuple[Tensor, ...] = ()
    wanted: Container[str] = ()
    grads_are_views: bool = False

    def parameter(self, name: str) -> Parameter:
        """A parameter of the operator's unit."""
        return self.model.local[self.span.chunk][self.unit.prefix][name]

    def bias(self, name: str) -> Tensor | None:
        """A bias of the operator's unit; None if the model has none."""
        found = self.model.local[self.span.chunk][self.unit.prefix].get(f"{name}.bias")
        return None if found is None else found.value

    def rows(self, whole: Tensor) -> Tensor:
        """The call's rows of a tensor that has one row per token of the rank."""
        shard = self.model.shapes.shard_tokens
        if self.span.size == shard:
            return whole
        blocks = whole.view(whole.shape[0] // shard, shard, *whole.shape[1:])
        return blocks[:, self.span.first : self.span.stop].reshape(-1, *whole.shape[1:])

    def only(self) -> Tensor:
        """The tensor of the operator's single input."""
        return self.tensors[self.op.inputs[0]]

    def linear(self, x: Tensor, name: str, bias: Tensor | None) -> Tensor:
        """x times the weight `name` (+ bias); its FLOPs are counted."""
        weight = self.parameter(name).value
        self.model.flop += 2.0 * x.shape[0] * weight.numel()
        return arithmetic.linear(x, weight, bias)
