"""Collectives and point-to-point messages of actions, on the storages of a rank."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rematbench.costs.operators.ops import Activation
from rematbench.engine.lowering.slices import MARK
from rematbench.engine.program.action import COMPUTE, Action, Kind
from rematbench.engine.program.program import Program
from rematbench.engine.program.storage import OF_VOCABULARY, STEP, ModelPart, Storage, stage_of
from rematbench.host.table import grouped
from rematbench.inputs.layout import Layout
from rematbench.worlds.torch.groups import Channel, Group, Groups
from rematbench.worlds.torch.heads import heads_to_rows, put, rows_to_heads
from rematbench.worlds.torch.parameters import Parameter
from rematbench.worlds.torch.rank_model import RankModel
from rematbench.worlds.torch.storages import Memory, Span, Value
from rematbench.worlds.torch.streams import Mark, PendingMessage, Streams
from rematbench.worlds.torch.unit_states import UnitStates

STATE_PEERS = ("dp", "edp")
"""The groups over which ZeRO shards states: `edp` for experts, `dp` for all others."""
SEVERAL = ("attention", "sort")
"""The operators that gather several tensors: keys and values, or tokens and probabilities."""
ORDERS = ("to_heads", "to_rows")
"""The all-to-alls of Ulysses, which change the order of elements."""


class Exchanges:
    """The all-gathers, reduce-scatters, all-reduces and all-to-alls of one rank."""

    def __init__(self, model: RankModel, groups: Groups, memory: Memory, streams: Streams) -> None:
        self.model, self.groups, self.memory = model, groups, memory
        self.streams = streams
        self.reduced: dict[tuple[int, str], set[str]] = {}
        """The units whose gradients are summed, by chunk and group."""

    def group(self, action: Action) -> Group:
        assert action.exchange.comm is not None
        return self.groups.by_name[action.exchange.comm.group]

    def _output_pool(self, *, stays: bool) -> AbstractContextManager[object]:
        """The context in which to allocate a collective's output: the memory pool of storages if
        the output stays, otherwise the stream's own pool, because the output is dropped once the
        collective is issued."""
        return self.streams.storage_pool() if stays else nullcontext()

    def all_gather(self, action: Action, span: Span) -> None:
        """Gather the rows of all ranks of the group into a new storage, or several tensors into one
        buffer. An action that allocates nothing gathers an existing tensor in place."""
        group = self.group(action)
        if self._of_states(action):
            self._gather_parameters(action, span)
            return
        if action.op in SEVERAL:
            self._gather_several(action, span, group)
            return
        if not action.allocs:
            whole = self.memory[span.key(action.reads[0])].data.view(-1)
            own = whole.chunk(group.size)[group.rank]
            self.streams.run(action.stream, lambda: group.all_gather(whole, own))
            return
        source = self.memory[span.key(action.reads[0])].rows(span.first, span.size)
        if action.op in self.model.sides:
            source = source[:, self.model.sides[action.op]].contiguous()
        with self.streams.storage_pool():
            out = source.new_empty(source.shape[0] * group.size, source.shape[1])
        self.streams.run(action.stream, lambda: group.all_gather(out, source), out)
        self.memory.put(span.key(action.allocs[0].storage), Value(out, span.first, span.size))

    def all_to_all(self, action: Action, span: Span) -> None:
        """Send each rank of the group its rows. Under Ulysses, this changes tensors or gradients
        from the order of rows to the order of heads, or back."""
        group, head_dim = self.group(action), self.model.kind.head_dim
        heads = self.model.heads(action)
        back = action.reads[0].is_gradient
        to_heads = (action.op == "to_heads") != back
        move: Callable[[Tensor, Tensor], None] = group.all_to_all
        if action.op in ORDERS:
            turn = rows_to_heads if to_heads else heads_to_rows
            move = partial(turn, group=group, head_dim=head_dim)
        for source, target, width in self._pairs(action, span.chunk, back=back):
            sent = self.memory[span.key(source)].rows(span.first, span.size)
            if heads and source.piece is None:
                sent = heads.of("attn_out", sent, 1)
            columns = width // heads.pieces(target.tensor) if heads else width
            shape = (sent.shape[0] // group.size, columns)
            if action.op not in ORDERS:
                shape = (sent.shape[0], sent.shape[1])
            elif to_heads:
                shape = (sent.shape[0] * group.size, columns // group.size)
            with self._output_pool(stays=target in {alloc.storage for alloc in action.allocs}):
                out = sent.new_empty(shape)
            self.streams.run(action.stream, partial(move, out, sent), out)
            self._arrived(action, span, target, out)

    def _pairs(
        self, action: Action, chunk: int, *, back: bool
    ) -> list[tuple[Storage, Storage, int]]:
        """(storage sent, storage received, elements of a received row in the order of rows) of each
        tensor that the action exchanges."""
        unit = self.model.units[chunk][action.part]
        op = unit.table.op(action.op)
        named = (*action.reads, *(alloc.storage for alloc in action.allocs))
        there = {storage.whole: storage for storage in named}
        ends = (op.outputs, op.inputs) if back else (op.inputs, op.outputs)
        found = []
        for source, target in zip(*ends, strict=True):
            ours = [self.model.chunks[chunk].storage(unit, name) for name in (source, target)]
            if all(storage in there for storage in ours):
                width = unit.table.activations[target].row_bytes // self.model.dtype.itemsize
                found.append((there[ours[0]], there[ours[1]], width))
        return found

    def _arrived(self, action: Action, span: Span, target: Storage, out: Tensor) -> None:
        """Store an output as a new storage or in rows of an existing one, to which a gradient is
        added."""
        if target in {alloc.storage for alloc in action.allocs}:
            self.memory.put(span.key(target), Value(out, span.first, span.size))
            return
        rows = self.memory[span.key(target)].view(span.first, span.size)
        if target.is_gradient:
            self.streams.run(action.stream, partial(rows.add_, out.view(rows.shape)))
        else:
            self.streams.run(action.stream, partial(put, rows, out, self.model.heads(action)))

    def _several(self, action: Action, chunk: int) -> list[Activation]:
        """The tensors that an action gathers, or whose gradients it scatters: the inputs of its
        operator except the queries, which stay on their rank."""
        table = self.model.units[chunk][action.part].table
        return [table.activations[name] for name in table.op(action.op).inputs if name != "q"]

    def _gather_several(self, action: Action, span: Span, group: Group) -> None:
        by_name = {storage.tensor: storage for storage in action.reads}
        tensors = self._several(action, span.chunk)
        own = [self.memory[span.key(by_name[tensor.name])].data for tensor in tensors]
        sizes = [group.size * tensor.nbytes for tensor in tensors]
        with self.streams.storage_pool():
            out = own[0].new_empty(sum(sizes), dtype=torch.uint8)

        def work() -> None:
            for whole, part in zip(torch.split(out, sizes), own, strict=True):
                group.all_gather(whole.view(part.dtype), part.view(-1))

        self.streams.run(action.stream, work, out)
        self.memory.put(span.key(action.allocs[0].storage), Value(out))

    def reduce_scatter(self, action: Action, span: Span) -> None:
        """Store this rank's rows of the sum as a new storage, or in rows of an existing one."""
        group = self.group(action)
        if self._of_states(action):
            self._scatter_gradients(action, span)
            return
        if action.op in SEVERAL:
            self._scatter_several(action, span, group)
            return
        part = self.memory[span.key(action.reads[0])].data
        with self._output_pool(stays=bool(action.allocs)):
            own = part.new_empty(part.shape[0] // group.size, part.shape[1])
        side = self.model.sides.get(action.op, slice(None))
        whole = own if side == slice(None) else own.new_zeros(own.shape[0], 2 * own.shape[1])
        for alloc in action.allocs:
            self.memory.put(span.key(alloc.storage), Value(whole, span.first, span.size))
        targets = [
            (storage, self.memory[span.key(storage)].view(span.first, span.size))
            for storage in action.reads[1:]
        ]

        def work() -> None:
            group.reduce_scatter(own, part)
            if whole is not own:
                whole[:, side] = own
            for storage, target in targets:
                if storage.is_gradient:
                    target.add_(whole.view(target.shape))
                else:
                    target.copy_(own.view(target.shape))

        self.streams.run(action.stream, work)

    def _scatter_several(self, action: Action, span: Span, group: Group) -> None:
        """Sum the gradients that one buffer holds, and store this rank's rows of each."""
        tensors = self._several(action, span.chunk)
        whole = self.memory[span.key(action.reads[0])].data.view(torch.uint8)
        parts = torch.split(whole, [group.size * tensor.nbytes for tensor in tensors])
        for alloc, tensor, part in zip(action.allocs, tensors, parts, strict=True):
            dtype = self.model.dtype_of(tensor)
            with self.streams.storage_pool():
                shape = (tensor.rows, tensor.row_bytes // dtype.itemsize)
                own = whole.new_empty(shape, dtype=dtype)
            work = partial(group.reduce_scatter, own.view(-1), part.view(dtype))
            self.streams.run(action.stream, work)
            self.memory.put(span.key(alloc.storage), Value(own, span.first, span.size))

    def all_reduce(self, action: Action, span: Span) -> None:
        group = self.group(action)
        if self._of_states(action):
            self._reduce_gradients(action, span.chunk)
        elif action.op == "norm_gradients":
            self._reduce_norms(action, span.chunk, group)
        elif not action.op.endswith("_norm"):  # a norm's kernel has summed the statistics of rows
            both = action.exchange.comm is not None and action.exchange.comm.group == "columns"
            for storage in action.reads if both else action.reads[:1]:
                rows = self.memory[span.key(storage)].view(span.first, span.size)
                self.streams.run(action.stream, partial(group.all_reduce, rows))

    def _of_states(self, action: Action) -> bool:
        """Whether an action sums gradients or gathers weights over the ranks that share states."""
        comm = action.exchange.comm
        return comm is not None and comm.group in STATE_PEERS

    def _units_due(self, action: Action, chunk: int) -> list[ModelPart]:
        """The units whose gradients an action sums over its peers: the units of the chunk, from the
        last to the action's unit, that are not summed yet."""
        comm = action.exchange.comm
        assert comm is not None
        units = [u.prefix for u in reversed(self.model.chunks[chunk].units)]
        if action.part:
            units = units[: units.index(action.part) + 1]
        done = self.reduced.setdefault((chunk, comm.group), set())
        due = [prefix for prefix in units if prefix not in done]
        done.update(due)
        return due

    def _scatter_gradients(self, action: Action, span: Span) -> None:
        """Reduce the gradients of the chunk's units that are due. If states are kept by unit, every
        micro-batch reduces each unit's buffer in one collective."""
        if self.model.sharing is None:
            self._reduce_gradients(action, span.chunk)
            return
        scatter = self.groups.by_name["dp"].reduce_scatter
        for storage in action.reads:
            states = self.model.unit_states[span.chunk][storage.part]
            whole = self.memory[span.key(storage)].data
            self.streams.run(action.stream, partial(states.reduce, whole, scatter))

    def _reduce_gradients(self, action: Action, chunk: int) -> None:
        group = self.group(action)
        parameters = self._sharing(action, chunk, self._units_due(action, chunk))

        def work() -> None:
            for parameter in parameters:
                if action.kind is Kind.ALL_REDUCE:
                    group.all_reduce(parameter.grad_flat)
                else:
                    whole = parameter.grad_flat
                    group.reduce_scatter(whole[parameter.start : parameter.stop], whole)

        self.streams.run(action.stream, work)

    def _sharing(
        self, action: Action, chunk: int, prefixes: Iterable[ModelPart]
    ) -> list[Parameter]:
        comm = action.exchange.comm
        of_experts = comm is not None and comm.group == "edp"
        among = [p for prefix in prefixes for p in self.model.unit_parameters(chunk, prefix)]
        return [p for p in among if p.spec.expert == of_experts]

    def _reduce_norms(self, action: Action, chunk: int, group: Group) -> None:
        """Sum the gradients of norms and routers (of the action's unit, or all) over the group:
        each rank has the whole weight but only the gradient of its own tokens."""
        among = list(self.model.parameters.values())
        if action.part:
            among = self.model.unit_parameters(chunk, action.part)
        norms = [parameter for parameter in among if parameter.spec.own_rows]
        sums = [p.grad_flat if p.grad_shard is None else p.grad_shard for p in norms]

        def work() -> None:
            for gradient in sums:
                if gradient.numel():
                    group.all_reduce(gradient)

        self.streams.run(action.stream, work)

    def _gather_parameters(self, action: Action, span: Span) -> None:
        """Gather the ZeRO shards of the compute copies of a unit (or of the whole chunk)."""
        group, chunk = self.group(action), span.chunk
        if self.model.sharing is not None:
            self._gather_units(action, span, group)
            return
        prefixes = [action.part] if action.part else list(self.model.units[chunk])
        parameters = self._sharing(action, chunk, prefixes)

        def work() -> None:
            for parameter in (one for one in parameters if one.spec.trained):
                group.all_gather(parameter.flat, parameter.flat[parameter.start : parameter.stop])

        self.streams.run(action.stream, work)

    def _gather_units(self, action: Action, span: Span, group: Group) -> None:
        """Gather a unit's weights into a buffer of the program, or every unit's weights in
        place."""
        by_prefix = self.model.unit_states[span.chunk]
        due = [by_prefix[action.part]] if action.part else list(by_prefix.values())
        for states in due:
            if action.allocs:
                self._gather_into_room(action, span, states, group)
                continue
            whole = self.memory[span.key(action.reads[0])].data if action.reads else states.weights
            self.streams.run(action.stream, partial(states.gather, whole, group.all_gather))

    def _gather_into_room(
        self, action: Action, span: Span, states: UnitStates, group: Group
    ) -> None:
        """Gather a unit's weights into new memory, after compute, which may still use the
        memory."""
        self.streams.wait(action.stream, self.streams.mark(COMPUTE))
        with self.streams.storage_pool():
            whole = states.weights.new_empty(states.size)
        self.streams.run(action.stream, partial(states.gather, whole, group.all_gather), whole)
        self.memory.put(span.key(action.allocs[0].storage), Value(whole))
        states.lend_weights(whole)


TIED_TAG = 1
MOST_SLICES = 128  # each slice of a sequence has its own tags of messages


class Message(NamedTuple):
    """The channel of a message, and the message's tag on that channel."""

    channel: Channel
    tag: int


def message(layout: Layout, stage: int, action: Action, span: tuple[int, int]) -> Message:
    """The channel and tag of a SEND or RECV on a stage, for a (micro-batch, chunk). The tag follows
    from the micro-batch and the virtual stage of the receiver. The gradient of a shared embedding
    uses the links between the last and the first stage. A message from one chunk of a rank to
    another has the rank as sender and receiver."""
    pp, (micro_batch, chunk) = layout.pp, span
    sends = action.kind is Kind.SEND
    if action.op[0] in OF_VOCABULARY:
        word = action.op if sends or not action.event else action.event.message
        other = int(word[1:] or pp - 1)
        ends = (stage, other) if sends else (other, stage)
        return Message(Channel(word[0], *ends), micro_batch)
    if action.op == "tied":
        ends = (stage, pp - 1 - stage) if sends else (pp - 1 - stage, stage)
        return Message(Channel("b" if ends[0] == 0 else "f", *ends), TIED_TAG)
    word, _, number = action.op.partition(MARK)
    if number:
        micro_batch = micro_batch * MOST_SLICES + int(number)
    step, back = STEP[word], word[0] == "b"
    receiver = chunk * pp + stage_of(word, stage, pp, receives=not sends)
    receiver += (-1 if back else 1) * sends
    tag = 2 + (micro_batch * layout.num_chunks + receiver) * 2 + back
    ends = (stage, stage + step) if sends else (stage - step, stage)
    return Message(Channel("f" if step > 0 else "b", ends[0] % pp, ends[1] % pp), tag)


def _messages(program: Program, layout: Layout, kind: Kind) -> Iterator[Message]:
    for stage, rank in enumerate(program.ranks):
        for action, micro_batch, chunk in rank.actions():
            if action.kind is kind:
                yield message(layout, stage, action, (micro_batch, chunk))


def used_channels(program: Program, layout: Layout) -> set[Channel]:
    """The channels that carry a message of any rank."""
    return {channel for channel, _ in _messages(program, layout, Kind.SEND)}


def reordered_channel(program: Program, layout: Layout) -> str:
    """The first channel whose messages are received in a different order than they are sent, in
    words; empty if there is none. A transport without tags (NCCL) would mix up such messages."""
    kinds = (Kind.SEND, Kind.RECV)
    sent, received = (grouped(_messages(program, layout, kind)) for kind in kinds)
    for channel in {**sent, **received}:
        if sent.get(channel) != received.get(channel):
            return f"stage {channel.sender} to {channel.receiver} ({channel.direction})"
    return ""


class Messages:
    """Sends and receives of one rank; the event of an action holds its messages in flight."""

    def __init__(self, model: RankModel, groups: Groups, memory: Memory, streams: Streams) -> None:
        self.model, self.groups, self.memory = model, groups, memory
        self.streams = streams
        self.pending: list[PendingMessage] = []
        self.callbacks: list[Callable[[], object]] = []
        self.posted: list[tuple[dist.Work, Tensor]] = []
        self.turning: dict[int, tuple[Tensor, Mark]] = {}  # by tag, from one chunk to another
        self.tied = model.parameters.get("embedding.weight")
        exchanged = model.place.pp in (model.problem.embedding_ranks or ())
        self.arrival: Tensor | None = None
        if exchanged and self.tied is not None:
            self.arrival = torch.empty_like(self.tied.grad_flat)

    def states(self) -> list[Tensor]:
        return [] if self.arrival is None else [self.arrival]

    def attach(self, mark: Mark) -> None:
        """Make an event wait for the messages issued since the last event."""
        mark.messages, self.pending = self.pending, []
        mark.callbacks, self.callbacks = self.callbacks, []

    def message_of(self, action: Action, span: Span) -> Message:
        lay, stage = self.model.problem.layout, self.model.place.pp
        return message(lay, stage, action, (span.micro_batch, span.chunk))

    def send(self, action: Action, span: Span) -> None:
        """Start a send; the sent storage stays alive until the event."""
        found = self.message_of(action, span)
        if action.op == "tied":
            tied, arrival = self.tied, self.arrival
            assert tied is not None
            assert arrival is not None
            self._begin(found, self._send(tied.grad_flat, found))
            self.callbacks.append(partial(tied.grad_flat.add_, arrival))
            return
        data = self.memory[span.key(action.reads[0])].data
        turns = found.channel.sender == found.channel.receiver
        if turns or self.groups.buffered:
            # Gloo's send blocks the host until the receiver is ready, whereas a GPU's host would
            # continue to issue.  The copy is transport memory, outside the ledger.
            with _disable_current_modes():
                data = data.clone()
        if turns:
            self.turning[found.tag] = data, self.streams.mark(action.stream)
        elif self.groups.buffered:
            self.post(data, found)
        else:
            self._begin(found, self._send(data, found))

    def _begin(self, message: Message, work: dist.Work) -> None:
        self.pending.append(self.streams.pending(message.channel, work))

    def _send(self, data: Tensor, message: Message) -> dist.Work:
        channel = message.channel
        return self.groups.send(data, channel.receiver, channel.direction, message.tag)

    def receive_into(self, data: Tensor, message: Message) -> None:
        channel = message.channel
        work = self.groups.receive(data, channel.sender, channel.direction, message.tag)
        self._begin(message, work)

    def post(self, data: Tensor, message: Message) -> None:
        """Send a tensor that is kept alive until the end of the step. The action's event does not
        wait for it."""
        self.posted.append((self._send(data, message), data))

    def flush(self) -> None:
        while self.posted:
            self.posted.pop()[0].wait()

    def receive(self, action: Action, span: Span) -> None:
        if action.op == "tied":
            assert self.arrival is not None
            self.receive_into(self.arrival, self.message_of(action, span))
            return
        columns = action.nbytes // (span.size * self.model.dtype.itemsize)
        data = torch.empty(span.size, columns, dtype=self.model.dtype, device=self.model.device)
        found = self.message_of(action, span)
        if found.tag in self.turning:
            copy, mark = self.turning.pop(found.tag)
            self.streams.wait(action.stream, mark)
            self.streams.run(action.stream, partial(data.copy_, copy), data)
        else:
            self.receive_into(data, found)
        rows = Value(data, span.first, span.size)
        self.memory.put(span.key(action.allocs[0].storage), rows)
