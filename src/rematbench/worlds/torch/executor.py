"""The interpreter of actions: each kind of action has a small function in a table."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rematbench.engine.lowering.slices import KEYS, slice_of
from rematbench.engine.program.action import HOST_UPDATE, Action, Kind
from rematbench.engine.program.program import RankProgram
from rematbench.engine.program.storage import Event, Role, Storage, part_of, storage_of
from rematbench.worlds.torch import operators
from rematbench.worlds.torch.dispatch import Tracker
from rematbench.worlds.torch.ends import finish_loss
from rematbench.worlds.torch.exchanges import Exchanges, Messages
from rematbench.worlds.torch.groups import Groups
from rematbench.worlds.torch.heads import put
from rematbench.worlds.torch.movers import HostUpdates, Movers
from rematbench.worlds.torch.operands import Call, Names, Operands
from rematbench.worlds.torch.parameters import AdamW, Parameter
from rematbench.worlds.torch.rank_model import SAVED, RankModel
from rematbench.worlds.torch.shared_vocabulary import SharedVocabulary
from rematbench.worlds.torch.storages import (
    ExecutionError,
    Memory,
    Slots,
    Span,
    Value,
    compact,
    describe,
)
from rematbench.worlds.torch.streams import Mark, Streams, make_streams

FIRST = part_of("P", 0)


class Executor:
    def __init__(
        self,
        program: RankProgram,
        model: RankModel,
        groups: Groups,
        *,
        tracker: Tracker | None = None,
        optimizer: AdamW | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.model, self.groups, self.tracker = model, groups, tracker
        self.optimizer = optimizer or AdamW()
        self.actions = [
            (index, action, step.micro_batch, step.chunk)
            for index, step in enumerate(program.steps)
            for action in program.blocks[step.block].actions
        ]
        self.names = Names(model)
        self.memory = Memory()
        self.streams = streams or make_streams(model.device)
        self.exchanges = Exchanges(model, groups, self.memory, self.streams)
        self.slots = Slots(program, model.device)
        self.host_updates = HostUpdates(self.streams)
        self.movers = Movers(
            model, self.memory, self.slots, tracker, self.streams, self.host_updates
        )
        self.messages = Messages(model, groups, self.memory, self.streams)
        self.events: dict[tuple[Event, int, int], Mark] = {}
        self.local: dict[Event, Mark] = {}
        self.counting: dict[Storage, bool] = {}  # whether a forward (not a recomputation) made it
        self.loss = torch.zeros((), dtype=torch.float64, device=model.device)
        self.step = 0
        self.bytes_after: list[tuple[int, int]] = []
        self.recompute_flop = 0.0
        self.before_update: Callable[[list[Parameter]], None] = lambda parameters: None
        self.table: dict[Kind, Callable[[Action, Span], None]] = {
            Kind.FORWARD: self.forward,
            Kind.RECOMPUTE: self.recompute,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
            Kind.SPLIT: self.movers.split,
            Kind.JOIN: self.movers.join,
            Kind.D2H: self.movers.to_host,
            Kind.H2D: self.movers.to_device,
            Kind.ALL_GATHER: self.exchanges.all_gather,
            Kind.REDUCE_SCATTER: self.exchanges.reduce_scatter,
            Kind.ALL_REDUCE: self.all_reduce,
            Kind.ALL_TO_ALL: self.exchanges.all_to_all,
            Kind.SEND: self.messages.send,
            Kind.RECV: self.messages.receive,
            Kind.ALLOC: self.movers.alloc,
            Kind.FREE: lambda action, span: None,
            Kind.EVENT: lambda action, span: None,
            Kind.STALL: lambda action, span: None,
            Kind.WAIT: self.wait,
            Kind.OPTIMIZER: self.update,
        }
        self.vocabulary: SharedVocabulary | None = None
        if model.shares:
            self.vocabulary = SharedVocabulary(self.messages, self._outside, self.loss)
            self.table = self.vocabulary.over(self.table)

    def _outside(self, tensor: Tensor) -> None:
        if self.tracker is not None:
            self.tracker.forget(tensor)

    def states(self) -> list[Tensor]:
        """The device's tensors that are not activations: states, slots, buffers of messages."""
        own = [*self.slots.arenas.values(), *self.messages.states(), self.loss]
        return [*self.model.states(), *own]

    def run_step(self) -> float:
        """Run one optimizer step over the micro-batches; return this rank's part of the summed
        loss."""
        self.issue_step()
        return float(self.loss)

    def issue_step(self) -> None:
        """Issue every action of one step and wait for the messages. The loss stays a tensor, so
        that the host need not wait for it."""
        self.step += 1
        self.loss.zero_()
        self.exchanges.reduced.clear()
        self.events.clear()
        self.bytes_after.clear()
        for parameter in self.model.parameters.values():
            if not self.model.update_in_backward:
                parameter.grad_flat.zero_()
        for states in self.model.every_unit():
            states.gradients.zero_()
        if self.vocabulary is not None:
            self.vocabulary.look_up()
        self.streams.begin()
        if self.tracker is not None:
            self.tracker.exclude([*self.states(), *self.model.host_states()])
            with self.tracker:
                self._walk()
        else:
            self._walk()
        self.messages.flush()
        self.streams.flush()
        if self.memory.values:
            raise ExecutionError(f"{next(iter(self.memory.values))[0]} is never freed")

    def _walk(self) -> None:
        block = -1
        for index, action, micro_batch, chunk in self.actions:
            if index != block:
                block = index
                self.local.clear()
            try:
                self._act(action, micro_batch, chunk)
            except ExecutionError:
                raise
            except Exception as error:
                where = describe(action, micro_batch, chunk)
                raise ExecutionError(f"{where}: {type(error).__name__}: {error}") from error
            if self.tracker is not None:
                self.bytes_after.append((self.tracker.device_bytes, self.tracker.host_bytes))

    def _act(self, action: Action, micro_batch: int, chunk: int) -> None:
        span = self.span(action, micro_batch, chunk)
        with self.streams.on(action.stream):
            self.table[action.kind](action, span)
            self.movers.move_to_slots(action, span)
        if action.stream != "compute":
            for alloc in action.allocs:
                self.streams.share(action.stream, self.memory[span.key(alloc.storage)].data)
        for event in (action.exchange.begin, action.event):
            if event:
                self._record(event, action, span)
        for storage in action.frees:
            self.movers.free(span.key(storage))

    def span(self, action: Action, micro_batch: int, chunk: int) -> Span:
        """The span of an action, with rows counted in the rank's own shard."""
        if ends := self.model.slice_ends:
            number = slice_of(action)
            first = ends[number]
            return Span(micro_batch, chunk, first, ends[number + 1] - first)
        rows = self.model.shapes.shard_tokens
        if self.model.heads(action):
            return Span(micro_batch, chunk, 0, rows)
        first, count = round(rows * action.rows.offset), round(rows * action.rows.fraction)
        return Span(micro_batch, chunk, first, count)

    def _record(self, event: Event, action: Action, span: Span) -> None:
        """Record an event of an action. The event of a SEND or RECV also holds the message; the
        event of an update on the host also holds the update's thread."""
        mark = self.streams.mark(action.stream)
        if action.kind in (Kind.SEND, Kind.RECV):
            self.messages.attach(mark)
        if action.stream == HOST_UPDATE:
            self.host_updates.attach(mark)
        if event.is_local:
            self.local[event] = mark
        else:
            self.events[event, span.micro_batch, span.chunk] = mark

    def wait(self, action: Action, span: Span) -> None:
        event = action.wait
        assert event is not None
        mark = self.local.get(event) or self.events.get((event, span.micro_batch, span.chunk))
        if mark is None:
            raise ExecutionError(f"an action waits for {event}, but no action records it")
        self.streams.wait(action.stream, mark)

    def _call(self, action: Action, span: Span, operands: Operands) -> Call:
        tensors: dict[str, Tensor] = {}
        for name, storage, whole in operands.reads:
            value = self.memory[span.key(storage)]
            tensors[name] = value.data if whole else value.rows(span.first, span.size)
        for name, storages in operands.context:
            before = [self.memory[span.key(storage)].data for storage in storages]
            tensors[name] = torch.cat([*before, tensors[name]])
        of = self.model, operands.unit, operands.op, span, tensors
        return Call(*of, wanted=operands.places, heads=self.model.heads(action))

    def forward(self, action: Action, span: Span) -> None:
        found = self.names.of(action, span.chunk)
        call = self._call(action, span, found)
        made = operators.OPERATORS[action.op].forward(call)
        for output, (name, fresh) in found.places.items():
            if fresh:
                self._put(name, span, made[output])
            else:
                target = self.memory[span.key(name)].view(span.first, span.size)
                put(target, made[output], call.heads)
        if action.op in SAVED:
            name = found.places[SAVED[action.op]][0]
            self.counting[name] = action.kind is Kind.FORWARD
            if call.op.reduce is None:
                self._finish_loss(call, name, span, action.stream)

    def recompute(self, action: Action, span: Span) -> None:
        before = self.model.flop
        self.forward(action, span)
        self.recompute_flop += self.model.flop - before

    def _finish_loss(self, call: Call, name: Storage, span: Span, stream: str) -> None:
        saved = {SAVED[call.op.name]: self.memory[span.key(name)].rows(span.first, span.size)}
        counts = self.counting.pop(name)

        def work() -> None:
            total = finish_loss(call._replace(tensors=saved), self.groups.by_name["tp"])
            if counts:
                self.loss.add_(total)

        self.streams.run(stream, work)

    def all_reduce(self, action: Action, span: Span) -> None:
        """Run a collective; for a loss, combine the statistics of softmax over vocabulary
        shards."""
        if action.op in SAVED:
            call = self._call(action, span, self.names.of(action, span.chunk))
            self._finish_loss(call, action.reads[0], span, action.stream)
        else:
            self.exchanges.all_reduce(action, span)

    def _backward_call(self, action: Action, span: Span, operands: Operands) -> Call:
        values = [self.memory[span.key(name)] for name in operands.incoming]
        grads = tuple(value.rows(span.first, span.size) for value in values)
        views = all(value.blocks == 1 for value in values)
        return self._call(action, span, operands)._replace(grads=grads, grads_are_views=views)

    def backward_input(self, action: Action, span: Span) -> None:
        """Compute input gradients into new storages, or add them to gradients that exist. For qkv,
        the gradients of the outputs change in place (RoPE is undone), so weight gradients of the
        same rows must follow, and each row must come only once."""
        found = self.names.of(action, span.chunk)
        made = operators.OPERATORS[action.op].backward(self._backward_call(action, span, found))
        if found.context:
            self._spread(action, span, made)
        adding = iter(found.adding)
        for name, gradient in made.items():
            storage = found.fresh.get(name, found.part)
            if name in found.fresh and len(made) == 1 and found.adding:  # the old sum is still read
                old = self.memory[span.key(next(adding))].view(span.first, span.size)
                self._put(found.fresh[name], span, gradient + old.view(gradient.shape))
            elif storage is not None:
                self._put(storage, span, gradient)
            else:
                target = self.memory[span.key(next(adding))].view(span.first, span.size)
                target.add_(gradient.view(target.shape))

    def _spread(self, action: Action, span: Span, made: dict[str, Tensor]) -> None:
        """Store or add the gradients of several slices' keys and values in each slice's storage."""
        new = {alloc.storage for alloc in action.allocs}
        ends = self.model.slice_ends
        for name in KEYS:
            whole = made.pop(name)
            for number in range(slice_of(action) + 1):
                first, last = ends[number : number + 2]
                storage = storage_of(action.part, name, Role.GRADIENT, piece=number)
                if storage in new:
                    rows = Value(compact(whole[first:last]), first, last - first)
                    self.memory.put(span.key(storage), rows)
                elif storage in action.reads:
                    self.memory[span.key(storage)].data.add_(whole[first:last])

    def backward_weight(self, action: Action, span: Span) -> None:
        found = self.names.of(action, span.chunk)
        operators.OPERATORS[action.op].weight(self._backward_call(action, span, found))

    def _put(self, storage: Storage, span: Span, tensor: Tensor) -> None:
        rows = (span.first, span.size) if tensor.dim() > 1 else (0, 0)
        self.memory.put(span.key(storage), Value(compact(tensor), *rows))

    def update(self, action: Action, span: Span) -> None:
        """AdamW on this rank's shard of every parameter, of one unit's parameters (in the
        backward), or of one piece of the states."""
        parameters = list(self.model.parameters.values())
        pieces = self.model.pieces
        if pieces is None and action.part:
            parameters = self.model.unit_parameters(span.chunk, action.part)
        if self.model.sharing and self.model.sharing.gradients_on_host:
            self.host_updates.finish()
        if self.vocabulary is not None:
            self.vocabulary.spread_gradients()
        # all gradients are summed before the first piece, or before the last in the backward
        seen = pieces.last if pieces and action.part.units else FIRST
        if pieces is None or action.part in ("", seen):
            with _disable_current_modes():  # an observer's bytes are not the program's
                self.before_update(parameters)
        rule, step = self.optimizer, self.step

        def whole() -> None:
            for parameter in parameters:
                parameter.update(rule, step)

        work = pieces.updating(action, span, self.memory, rule, step) if pieces else whole
        if action.stream == HOST_UPDATE:
            self.host_updates.start(work)
        else:
            work()
