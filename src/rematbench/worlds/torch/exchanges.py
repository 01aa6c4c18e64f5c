"""The collectives of actions, on the storages of a rank."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from rematbench.engine.program.action import Action, Kind, identity, is_gradient
from rematbench.worlds.torch import ulysses
from rematbench.worlds.torch.groups import Group, Groups
from rematbench.worlds.torch.model import RankModel
from rematbench.worlds.torch.storages import Memory, Span, Value
from rematbench.worlds.torch.streams import Streams


class Exchanges:
    """The all-gathers, reduce-scatters, all-reduces and all-to-alls of one rank."""

    def __init__(self, model: RankModel, groups: Groups, memory: Memory, streams: Streams) -> None:
        self.model, self.groups, self.memory = model, groups, memory
        self.streams = streams
        self.reduced: dict[int, set[str]] = {}  # chunk -> units whose gradients are summed

    def group(self, action: Action) -> Group:
        """The communicator that an action names."""
        assert action.comm is not None
        return self.groups.by_name[action.comm.group]

    def _room(self, *, stays: bool) -> AbstractContextManager[object]:
        """The context in which to allocate a collective's output. It is the memory pool of storages
        where the output stays, else the stream's own pool, for a tensor that is dropped once the
        collective is issued."""
        return self.streams.room() if stays else nullcontext()

    # -- activations ------------------------------------------------------------------------------

    def all_gather(self, action: Action, span: Span) -> None:
        """Gather the rows of every rank of the group; for attention, gather keys and values."""
        group = self.group(action)
        if group is self.groups.by_name["dp"]:
            self._gather_parameters(action, span.chunk)
            return
        if action.op == "attention":
            self._gather_kv(action, span, group)
            return
        source = self.memory[span.key(action.reads[0])].rows(span.first, span.size)
        with self.streams.room():
            out = source.new_empty(source.shape[0] * group.size, source.shape[1])
        self.streams.run(action.stream, lambda: group.all_gather(out, source), out)
        self.memory.put(span.key(action.allocs[0].name), Value(out, span.first, span.size))

    def all_to_all(self, action: Action, span: Span) -> None:
        """Under Ulysses, bring tensors into the other order, or their gradients back."""
        group, head_dim = self.group(action), self.model.kind.head_dim
        back = is_gradient(action.reads[0])
        to_heads = (action.op == "to_heads") != back
        move = ulysses.to_heads if to_heads else ulysses.to_rows
        for source, target, width in self._pairs(action, span.chunk, back=back):
            sent = self.memory[span.key(source)].rows(span.first, span.size)
            shape = (sent.shape[0] // group.size, width)
            if to_heads:
                shape = (sent.shape[0] * group.size, width // group.size)
            with self._room(stays=target in {alloc.name for alloc in action.allocs}):
                out = sent.new_empty(shape)
            work = partial(move, out, sent, group, head_dim)
            self.streams.run(action.stream, work, out)
            self._arrived(action, span, target, out)

    def _pairs(self, action: Action, chunk: int, *, back: bool) -> list[tuple[str, str, int]]:
        """(storage sent, storage made, elements per row of the latter in the order of rows)."""
        unit = self.model.units[chunk][action.part]
        op = unit.table.op(action.op)
        there = {identity(n): n for n in (*action.reads, *(a.name for a in action.allocs))}
        ends = (op.outputs, op.inputs) if back else (op.inputs, op.outputs)
        found = []
        for source, target in zip(*ends, strict=True):
            names = [self.model.chunks[chunk].storage(unit, name) for name in (source, target)]
            if all(name in there for name in names):
                width = unit.table.activations[target].row_bytes // self.model.dtype.itemsize
                found.append((there[names[0]], there[names[1]], width))
        return found

    def _arrived(self, action: Action, span: Span, target: str, out: Tensor) -> None:
        """Store an output as a new storage, or in rows of an existing one; add a gradient there."""
        if target in {alloc.name for alloc in action.allocs}:
            self.memory.put(span.key(target), Value(out, span.first, span.size))
            return
        rows = self.memory[span.key(target)].view(span.first, span.size)
        place = rows.add_ if is_gradient(target) else rows.copy_
        self.streams.run(action.stream, lambda: place(out.view(rows.shape)))

    def _gather_kv(self, action: Action, span: Span, group: Group) -> None:
        by_name = {identity(name).rpartition(".")[2]: name for name in action.reads}
        pair = [self.memory[span.key(by_name[name])].data for name in ("k", "v")]
        with self.streams.room():
            out = pair[0].new_empty(2, group.size * pair[0].numel())

        def work() -> None:
            for half, own in zip(out, pair, strict=True):
                group.all_gather(half, own.view(-1))

        self.streams.run(action.stream, work, out)
        self.memory.put(span.key(action.allocs[0].name), Value(out.view(-1)))

    def reduce_scatter(self, action: Action, span: Span) -> None:
        """Store this rank's rows of the sum as a new storage, or in rows of an existing one."""
        group = self.group(action)
        if group is self.groups.by_name["dp"]:
            self._reduce_gradients(action, span.chunk)
            return
        if action.op == "attention":
            self._scatter_kv(action, span, group)
            return
        part = self.memory[span.key(action.reads[0])].data
        with self._room(stays=bool(action.allocs)):
            own = part.new_empty(part.shape[0] // group.size, part.shape[1])
        for alloc in action.allocs:
            self.memory.put(span.key(alloc.name), Value(own, span.first, span.size))
        targets = [
            (name, self.memory[span.key(name)].view(span.first, span.size))
            for name in action.reads[1:]
        ]

        def work() -> None:
            group.reduce_scatter(own, part)
            for name, target in targets:
                if is_gradient(name):
                    target.add_(own.view(target.shape))
                else:
                    target.copy_(own.view(target.shape))

        self.streams.run(action.stream, work)

    def _scatter_kv(self, action: Action, span: Span, group: Group) -> None:
        halves = self.memory[span.key(action.reads[0])].data.view(2, -1)
        rows = self.model.shapes.tokens
        for alloc, half in zip(action.allocs, halves, strict=True):
            with self.streams.room():
                own = half.new_empty(rows, half.numel() // group.size // rows)
            into, whole = own.view(-1), half
            self.streams.run(action.stream, partial(group.reduce_scatter, into, whole))
            self.memory.put(span.key(alloc.name), Value(own, span.first, span.size))

    def all_reduce(self, action: Action, span: Span) -> None:
        """Sum over the group in place."""
        group = self.group(action)
        if group is self.groups.by_name["dp"]:
            self._reduce_gradients(action, span.chunk)
            return
        if action.op == "norm_gradients":
            self._reduce_norms(action, span.chunk, group)
            return
        rows = self.memory[span.key(action.reads[0])].view(span.first, span.size)
        self.streams.run(action.stream, lambda: group.all_reduce(rows))

    # -- states -----------------------------------------------------------------------------------

    def _units_due(self, action: Action, chunk: int) -> list[str]:
        """The units whose gradients an action sums: the chunk's units down to the action's unit."""
        units = [u.prefix for u in reversed(self.model.chunks[chunk].units)]
        if action.part:
            units = units[: units.index(action.part) + 1]
        done = self.reduced.setdefault(chunk, set())
        due = [prefix for prefix in units if prefix not in done]
        done.update(due)
        return due

    def _reduce_gradients(self, action: Action, chunk: int) -> None:
        group = self.groups.by_name["dp"]
        due = self._units_due(action, chunk)
        parameters = [p for prefix in due for p in self.model.unit_parameters(chunk, prefix)]

        def work() -> None:
            for parameter in parameters:
                if action.kind is Kind.ALL_REDUCE:
                    group.all_reduce(parameter.grad_flat)
                else:
                    whole = parameter.grad_flat
                    group.reduce_scatter(whole[parameter.start : parameter.stop], whole)

        self.streams.run(action.stream, work)

    def _reduce_norms(self, action: Action, chunk: int, group: Group) -> None:
        """Sum the gradients of norms over the group (of all norms, or of one unit's). Norms are
        replicated, and each rank has the gradient of its own tokens."""
        among = list(self.model.parameters.values())
        if action.part:
            among = self.model.unit_parameters(chunk, action.part)
        norms = [parameter for parameter in among if parameter.spec.norm]

        def work() -> None:
            for parameter in norms:
                group.all_reduce(parameter.grad_flat)

        self.streams.run(action.stream, work)

    def _gather_parameters(self, action: Action, chunk: int) -> None:
        """Gather the ZeRO shards of the compute copies of a unit (or of the whole chunk)."""
        group = self.groups.by_name["dp"]
        prefixes = [action.part] if action.part else list(self.model.units[chunk])
        parameters = [p for prefix in prefixes for p in self.model.unit_parameters(chunk, prefix)]

        def work() -> None:
            for parameter in parameters:
                group.all_gather(parameter.flat, parameter.flat[parameter.start : parameter.stop])

        self.streams.run(action.stream, work)
