"""What an action's operator reads and makes on a rank, by name.

The names are those of every micro-batch and step, so they are worked out once for each action of a
chunk; what is left of an action on the host is to look storages up and to issue kernels.
"""

from typing import NamedTuple

from rematbench.action import Action, Kind
from rematbench.lowering.chunk_ops import ChunkOps, Unit
from rematbench.operators.ops import Op
from rematbench.torch.memory import identity
from rematbench.torch.model import RankModel


class Read(NamedTuple):
    """A tensor of an operator: its name there, its storage, and whether all of the storage is meant
    (a gathered copy) or the action's rows."""

    name: str
    storage: str
    whole: bool = False


class Operands(NamedTuple):
    """One action's operator on a chunk.  `first`, `size`: its rows in units of the rank's shard.
    `places`: output -> (storage, whether it is new).  Of a backward `incoming` are the gradients of
    the outputs, `fresh` the new storages of input gradients by input, `part` the one of what is to
    be summed over ranks first, `adding` the gradients to add the others into, in order."""

    unit: Unit
    op: Op
    reads: tuple[Read, ...]
    places: dict[str, tuple[str, bool]]
    wanted: frozenset[str]
    incoming: tuple[str, ...]
    fresh: dict[str, str]
    part: str | None
    adding: tuple[str, ...]


class Names:
    """Operands by action and chunk, kept."""

    def __init__(self, model: RankModel) -> None:
        self.model = model
        self.known: dict[tuple[int, int], tuple[Action, Operands]] = {}

    def of(self, action: Action, chunk: int) -> Operands:
        """The operands of an action that runs an operator."""
        known = self.known.get((id(action), chunk))
        if known is None:  # the action is kept with them: its number stays its own
            known = self.known[id(action), chunk] = action, self._found(action, chunk)
        return known[1]

    def _found(self, action: Action, chunk: int) -> Operands:
        unit = self.model.units[chunk][action.part]
        op = next(op for op in unit.table.ops if op.name == action.op)
        ops = self.model.chunks[chunk]
        incoming = _leading_gradients(action)
        new = {identity(alloc.name): alloc.name for alloc in action.allocs}
        places = _places(action, ops, unit, op, new)
        return Operands(
            unit=unit,
            op=op,
            reads=_reads(action, ops, unit, op),
            places=places,
            wanted=frozenset(places),
            incoming=incoming,
            fresh=_fresh(ops, unit, op, new),
            part=new.get(f"{unit.prefix}.{op.name}.part"),
            adding=tuple(n for n in action.reads[len(incoming) :] if n.startswith("d:")),
        )


def _wants(action: Action, op: Op) -> tuple[str, ...]:
    """The activations an action works on: a forward's inputs, what a backward was left, and the
    loss's statistics between vocabulary shards."""
    if action.kind in (Kind.FORWARD, Kind.RECOMPUTE):
        return op.inputs
    return op.saves if action.kind is not Kind.ALL_REDUCE else ("loss_saved",)


def _reads(action: Action, ops: ChunkOps, unit: Unit, op: Op) -> tuple[Read, ...]:
    """A gathered copy stands for a single input; attention has it beside its queries."""
    there = {identity(name): name for name in action.reads if not name.startswith("d:")}
    names = _wants(action, op) or op.inputs
    found = {
        name: Read(name, there[storage])
        for name in names
        if (storage := ops.storage(unit, name)) in there
    }
    gathered = there.get(f"{unit.prefix}.{op.name}.full")
    if gathered is not None:
        key = "full" if op.name == "attention" else names[0]
        found[key] = Read(key, gathered, whole=True)
    return tuple(found.values())


def _places(
    action: Action, ops: ChunkOps, unit: Unit, op: Op, new: dict[str, str]
) -> dict[str, tuple[str, bool]]:
    """Outputs become new storages, or rows of storages that exist."""
    there = {identity(name): name for name in action.reads}
    part = new.get(f"{unit.prefix}.{op.name}.part")
    places: dict[str, tuple[str, bool]] = {}
    for output in op.outputs:
        storage = ops.storage(unit, output)
        if made := new.get(storage) or part:
            places[output] = (made, True)
        elif storage in there:
            places[output] = (there[storage], False)
    return places


def _leading_gradients(action: Action) -> tuple[str, ...]:
    """Gradients of the outputs: those that stand before the saved tensors."""
    found: list[str] = []
    for name in action.reads:
        if not name.startswith("d:"):
            break
        found.append(name)
    return tuple(found)


def _fresh(ops: ChunkOps, unit: Unit, op: Op, new: dict[str, str]) -> dict[str, str]:
    """Input -> the new storage of its gradient."""
    found = {name: ops.storage(unit, name) for name in op.inputs}
    return {name: new[storage] for name, storage in found.items() if storage in new}
