"""Point-to-point messages of actions between pipeline stages, on the storages of a rank."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rematbench.engine.lowering.slices import MARK
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.program import Program
from rematbench.engine.program.storage import STEP, stage_of
from rematbench.inputs.layout import Layout
from rematbench.worlds.torch.groups import Channel, Groups
from rematbench.worlds.torch.rank_model import RankModel
from rematbench.worlds.torch.storages import Memory, Span, Value
from rematbench.worlds.torch.streams import Mark, PendingMessage, Streams

TIED_TAG = 1
MOST_SLICES = 128  # each slice of a sequence has its own tags of messages


class Message(NamedTuple):
    """The channel that a message takes, and the tag of the message on that channel."""

    channel: Channel
    tag: int


def message(layout: Layout, stage: int, action: Action, span: tuple[int, int]) -> Message:
    """The message of a SEND or RECV on a stage, for a (micro-batch, chunk). Its tag follows from
    the micro-batch and the virtual stage of the receiver; the gradient of a shared embedding takes
    the closing links of the rings. A message to the rank's other chunk takes no channel."""
    pp, (micro_batch, chunk) = layout.pp, span
    sends = action.kind is Kind.SEND
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
    """The channels that the messages of any rank take."""
    return {channel for channel, _ in _messages(program, layout, Kind.SEND)}


def reordered_channel(program: Program, layout: Layout) -> str:
    """The first channel whose messages are received in a different order than they are sent. A
    transport without tags (NCCL) would mix such messages up. Empty if there is no such channel."""
    sent: dict[Channel, list[int]] = {}
    received: dict[Channel, list[int]] = {}
    for found, kind in ((sent, Kind.SEND), (received, Kind.RECV)):
        for channel, tag in _messages(program, layout, kind):
            found.setdefault(channel, []).append(tag)
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
        self.callbacks: list[Callable[[], None]] = []
        self.posted: list[tuple[dist.Work, Tensor]] = []
        self.turning: dict[int, tuple[Tensor, Mark]] = {}
        """Messages to this rank's other chunk, by tag."""
        self.tied = model.parameters.get("embedding.weight")
        exchanged = model.place.pp in (model.problem.embedding_ranks or ())
        self.arrival: Tensor | None = None
        if exchanged and self.tied is not None:
            self.arrival = torch.empty_like(self.tied.grad_flat)

    def states(self) -> list[Tensor]:
        """The storages of this object that are not activations."""
        return [] if self.arrival is None else [self.arrival]

    def attach(self, mark: Mark) -> None:
        """Make an event wait for the messages issued since the last event."""
        mark.messages, self.pending = self.pending, []
        mark.callbacks, self.callbacks = self.callbacks, []

    def _message(self, action: Action, span: Span) -> Message:
        """The message of an action on a span."""
        lay, stage = self.model.problem.layout, self.model.place.pp
        return message(lay, stage, action, (span.micro_batch, span.chunk))

    def send(self, action: Action, span: Span) -> None:
        """Start a send; the sent storage stays alive until the event."""
        found = self._message(action, span)
        if action.op == "tied":
            self._send_tied(found)
            return
        data = self.memory[span.key(action.reads[0])].data
        if found.channel.sender == found.channel.receiver:
            with _disable_current_modes():  # transport memory, as of `_post`
                self.turning[found.tag] = data.clone(), self.streams.mark(action.stream)
        elif self.groups.buffered:
            self._post(data, found)
        else:
            self._begin(found, self._send(data, found))

    def _begin(self, message: Message, work: dist.Work) -> None:
        self.pending.append(self.streams.pending(message.channel, work))

    def _send(self, data: Tensor, message: Message) -> dist.Work:
        channel = message.channel
        return self.groups.send(data, channel.receiver, channel.direction, message.tag)

    def _receive(self, data: Tensor, message: Message) -> None:
        channel = message.channel
        work = self.groups.receive(data, channel.sender, channel.direction, message.tag)
        self._begin(message, work)

    def _post(self, data: Tensor, message: Message) -> None:
        """Send a copy on gloo. Gloo's send blocks the host until the receiver is ready, whereas a
        GPU's host would continue to issue. The copy is transport memory, outside the ledger; the
        action's event is complete at once."""
        with _disable_current_modes():
            copy = data.clone()
        self.posted.append((self._send(copy, message), copy))

    def flush(self) -> None:
        """Wait until every copied message is sent."""
        while self.posted:
            self.posted.pop()[0].wait()

    def receive(self, action: Action, span: Span) -> None:
        """Allocate a boundary tensor and start to receive it."""
        if action.op == "tied":
            assert self.arrival is not None
            self._receive(self.arrival, self._message(action, span))
            return
        columns = action.nbytes // (span.size * self.model.dtype.itemsize)
        data = torch.empty(span.size, columns, dtype=self.model.dtype, device=self.model.device)
        found = self._message(action, span)
        if found.tag in self.turning:
            copy, mark = self.turning.pop(found.tag)
            self.streams.wait(action.stream, mark)
            self.streams.run(action.stream, partial(data.copy_, copy), data)
        else:
            self._receive(data, found)
        rows = Value(data, span.first, span.size)
        self.memory.put(span.key(action.allocs[0].storage), rows)

    def _send_tied(self, message: Message) -> None:
        tied, arrival = self.tied, self.arrival
        assert tied is not None
        assert arrival is not None
        self._begin(message, self._send(tied.grad_flat, message))
        self.callbacks.append(partial(_add, tied.grad_flat, arrival))


def _add(total: Tensor, arrived: Tensor) -> None:
    total.add_(arrived)
