"""The operands of an operator on a rank: storages, and the tensors of one call.

Every micro-batch and step has the same storages. So they are computed once for each action of a
chunk; afterwards the host only looks up storages and issues kernels.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import takewhile
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from rematbench.costs.operators.ops import Op
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps, Unit
from rematbench.engine.lowering.slices import KEYS, slice_of
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.storage import Role, Storage, storage_of
from rematbench.host.table import grouped
from rematbench.inputs.recipes import Recipe, recipe_of
from rematbench.worlds.torch import quantised
from rematbench.worlds.torch.heads import SPLIT, Heads
from rematbench.worlds.torch.parameters import Parameter
from rematbench.worlds.torch.rank_model import SAVED, RankModel
from rematbench.worlds.torch.storages import Span


class Read(NamedTuple):
    """A tensor that an operator reads: its name in the operator and its storage. `whole`: the
    operator reads the whole storage (a gathered copy) instead of the action's rows."""

    name: str
    storage: Storage
    whole: bool = False


class Operands(NamedTuple):
    """The operator of one action on a chunk, and the storages that it reads and writes.

    `places`: output -> (storage, whether the storage is new). For a backward: `incoming` are the
    gradients of the outputs, `fresh` the new storages of gradients by input, `part` the storage of
    a gradient that must still be summed over ranks, `adding` the storages to which further input
    gradients are added, in order. `context`: the keys and values of earlier slices, in order.
    """

    unit: Unit
    op: Op
    reads: tuple[Read, ...]
    places: dict[str, tuple[Storage, bool]]
    incoming: tuple[Storage, ...]
    fresh: dict[str, Storage]
    part: Storage | None
    adding: tuple[Storage, ...]
    context: tuple[tuple[str, tuple[Storage, ...]], ...] = ()


class Names:
    """The operands of each action of a chunk, computed at the first use and kept."""

    def __init__(self, model: RankModel) -> None:
        self.model = model
        self.known: dict[tuple[int, int], tuple[Action, Operands]] = {}

    def of(self, action: Action, chunk: int) -> Operands:
        known = self.known.get((id(action), chunk))
        if known is None:  # the action is kept too, so that no other action gets its id
            known = self.known[id(action), chunk] = action, self._found(action, chunk)
        return known[1]

    def _found(self, action: Action, chunk: int) -> Operands:
        unit = self.model.units[chunk][action.part]
        op = unit.table.op(action.op)
        ops = self.model.chunks[chunk]
        context: dict[str, list[Storage]] = {}
        if self.model.slice_ends and op.name == "attention":
            action, context = _own_slice(action)
        new = {alloc.storage.whole: alloc.storage for alloc in action.allocs}
        part = new.get(storage_of(unit.prefix, op.name, Role.PARTIAL))
        there = {storage.whole: storage for storage in action.reads}
        outputs = {name: ops.storage(unit, name) for name in op.outputs}
        inputs = {name: ops.storage(unit, unit.table.of_gradient(name)) for name in op.inputs}
        own = {storage.whole for storage in inputs.values()}
        gradient = attrgetter("is_gradient")
        incoming = tuple(  # in an action's reads they precede all other storages
            takewhile(lambda one: one.is_gradient and one.whole not in own, action.reads)
        )
        return Operands(
            unit=unit,
            op=op,
            reads=_reads(action, ops, unit, op),
            places=_places(outputs, there, new, part),
            incoming=incoming,
            fresh={name: new[storage] for name, storage in inputs.items() if storage in new},
            part=part,
            adding=tuple(filter(gradient, action.reads[len(incoming) :])),
            context=tuple((name, tuple(storages)) for name, storages in context.items()),
        )


def _own_slice(action: Action) -> tuple[Action, dict[str, list[Storage]]]:
    """(an attention's action without the tensors of other slices and the gradients of keys and
    values, the keys and values of earlier slices by name)."""
    number = slice_of(action)
    earlier = (each for each in action.reads if each.piece != number and not each.is_gradient)
    context = grouped((each.tensor, each) for each in earlier)
    if not context:
        return action, {}

    def stays(storage: Storage) -> bool:
        return not (storage.is_gradient and storage.tensor in KEYS)

    left = tuple(each for each in action.reads if each.piece == number and stays(each))
    allocs = tuple(each for each in action.allocs if stays(each.storage))
    return replace(action, reads=left, allocs=allocs), context


def _wants(action: Action, op: Op) -> tuple[str, ...]:
    """The activations that an action reads: the inputs for a forward, the saved tensors for a
    backward, and the softmax statistics of the loss for an all-reduce over vocabulary shards."""
    if action.kind in (Kind.FORWARD, Kind.RECOMPUTE):
        return op.inputs
    return op.saves if action.kind is not Kind.ALL_REDUCE else (SAVED[op.name],)


def _reads(action: Action, ops: ChunkOps, unit: Unit, op: Op) -> tuple[Read, ...]:
    """The tensors that an action's operator reads. A gathered copy replaces the operator's only
    input; or it holds several inputs, next to which attention reads its queries."""
    there = {each.whole: each for each in action.reads if not each.is_gradient}
    names = _wants(action, op) or op.inputs
    found = {
        name: Read(name, there[storage])
        for name in names
        if (storage := ops.storage(unit, name)) in there
    }
    gathered = there.get(storage_of(unit.prefix, op.name, Role.GATHERED))
    if gathered is not None:
        key = "full" if len(op.inputs) > 1 else names[0]
        found[key] = Read(key, gathered, whole=True)
    return tuple(found.values())


def _places(
    outputs: dict[str, Storage],
    existing: dict[Storage, Storage],
    new: dict[Storage, Storage],
    part: Storage | None,
) -> dict[str, tuple[Storage, bool]]:
    places: dict[str, tuple[Storage, bool]] = {}
    for output, storage in outputs.items():
        if fresh := new.get(storage) or part:
            places[output] = (fresh, True)
        elif storage in existing:
            places[output] = (existing[storage], False)
    return places


Tensors = dict[str, Tensor]


class Call(NamedTuple):
    """One call of an operator: its span, the tensors by activation name, the gradients of the
    outputs in order, and the names of the wanted outputs. `grads_are_views`: the gradients are
    views of their storages, so that writes into them persist. `wide`: packed weights by name, as
    values of the compute precision. `heads`: the piece of heads that the call computes."""

    model: RankModel
    unit: Unit
    op: Op
    span: Span
    tensors: Tensors
    grads: tuple[Tensor, ...] = ()
    wanted: Container[str] = ()
    grads_are_views: bool = False
    wide: Mapping[str, Tensor] = MappingProxyType({})
    heads: Heads | None = None

    def parameter(self, name: str) -> Parameter:
        return self.model.local[self.span.chunk][self.unit.prefix][name]

    def bias(self, name: str) -> Tensor | None:
        has = f"{name}.bias" in self.model.local[self.span.chunk][self.unit.prefix]
        return self.value(f"{name}.bias") if has else None

    def value(self, name: str) -> Tensor:
        """A weight or bias; for a piece of heads, the rows of the piece."""
        return self._piece(name, self.parameter(name).value)

    def _piece(self, name: str, whole: Tensor) -> Tensor:
        return self.heads.of(name, whole, 0) if self._split(name) and self.heads else whole

    def sums(self, name: str) -> list[Tensor]:
        """A weight's gradient sums; for a piece of heads, a view of the piece's rows for each
        rank."""
        whole = self.parameter(name).grad
        return self.heads.parts(name, whole, 0) if self._split(name) and self.heads else [whole]

    def _split(self, name: str) -> bool:
        return name.removesuffix(".bias") in SPLIT

    def rows(self, whole: Tensor) -> Tensor:
        """The call's rows of a tensor that has one row per token of the rank."""
        shard = self.model.shapes.shard_tokens
        if self.span.size == shard:
            return whole
        blocks = whole.view(whole.shape[0] // shard, shard, *whole.shape[1:])
        return blocks[:, self.span.first : self.span.stop].reshape(-1, *whole.shape[1:])

    def input(self) -> Tensor:
        """The operator's only input. If the input is stored as a quantised copy, the result has the
        values that the copy stands for."""
        name = self.op.inputs[0]
        x, source = self.tensors[name], self.unit.table.activations[name].copy_of
        if source:
            columns = self.unit.table.activations[source].row_bytes // self.model.dtype.itemsize
            given = self.recipe, columns, self.model.scales.get(self.scale_key(name), 1.0)
            return quantised.widened(x, *given, self.model.dtype)
        return self.narrowed(x)

    @property
    def recipe(self) -> Recipe:
        found = recipe_of(self.model.problem.workload)
        assert found is not None
        return found

    def scale_key(self, name: str) -> tuple[int, int, str, str]:
        return self.span.micro_batch, self.span.chunk, self.unit.prefix, name

    def narrowed(self, x: Tensor, *, weight: bool = False) -> Tensor:
        """x, rounded to its quantised form if the operator multiplies quantised operands."""
        return quantised.narrowed(x, self.recipe, weight=weight) if self.op.narrow else x

    def weight(self, name: str) -> Tensor:
        """The weight `name` as products read it: rounded to its quantised form, or in compute
        precision if it is packed."""
        parameter = self.parameter(name)
        if not parameter.spec.packing:
            return self.narrowed(self.value(name), weight=True)
        known = self.wide.get(name)
        return self._piece(name, self.widened((name,)).wide[name] if known is None else known)

    def widened(self, names: Sequence[str]) -> "Call":
        """The call with the packed weights `names` in compute precision, in one buffer."""
        found = {name: self.parameter(name) for name in names}
        sizes = [one.shape.numel() for one in found.values()]
        whole = self.model.where.new_empty(sum(sizes), dtype=self.model.dtype)
        parts = zip(found.items(), torch.split(whole, sizes), strict=True)
        return self._replace(wide={name: one.widened(part) for (name, one), part in parts})

    def opened(self, names: Sequence[str]) -> "Call":
        """The call; if the stack fuses linears and all weights `names` are packed, with these
        widened in one buffer."""
        fused = self.model.problem.system.kernels.fused_linears
        opens = fused and all(self.parameter(name).spec.packing for name in names)
        return self.widened(names) if opens else self

    def linear(self, x: Tensor, name: str, bias: Tensor | None) -> Tensor:
        """x times the weight `name` (+ bias); its FLOPs are counted."""
        weight = self.weight(name)
        self.model.flop += 2.0 * x.shape[0] * weight.numel()
        return F.linear(x, weight, bias)


def _absent(call: Call) -> NoReturn:
    raise KeyError(call.op.name)


class Operator(NamedTuple):
    """The functions of an operator: `forward` computes its outputs, `backward` the gradients of its
    inputs, and `weight` adds to the gradients of its weights. Missing functions raise KeyError."""

    forward: Callable[[Call], Tensors]
    backward: Callable[[Call], Tensors] = _absent
    weight: Callable[[Call], None] = _absent
