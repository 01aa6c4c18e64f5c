"""Point-to-point messages: boundary activations and their gradients, and gradients of tied ends."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.program import Program
from rematbench.spec.layout import Layout
from rematbench.worlds.torch.groups import STEP, Channel, Groups
from rematbench.worlds.torch.model import RankModel
from rematbench.worlds.torch.storages import Memory, Span, Value
from rematbench.worlds.torch.streams import Mark, Streams, Under

TIED_TAG = 1


class Message(NamedTuple):
    """The channel that a message takes, and the tag of the message on that channel."""

    channel: Channel
    tag: int


def message(layout: Layout, stage: int, action: Action, span: tuple[int, int]) -> Message:
    """The message of a SEND or RECV on a stage, for a (micro-batch, chunk). Its tag follows from
    the micro-batch and the virtual stage of the receiver; the gradient of a shared embedding takes
    the closing links of the rings."""
    pp, (micro_batch, chunk) = layout.pp, span
    sends = action.kind is Kind.SEND
    if action.op == "tied":
        ends = (stage, pp - 1 - stage) if sends else (pp - 1 - stage, stage)
        return Message(Channel("b" if ends[0] == 0 else "f", *ends), TIED_TAG)
    here, step = chunk * pp + stage, STEP[action.op]
    sender, receiver = (here, here + step) if sends else (here - step, here)
    tag = 2 + (micro_batch * layout.num_chunks + receiver) * 2 + (action.op == "b")
    return Message(Channel(action.op, sender % pp, receiver % pp), tag)


def _messages(program: Program, layout: Layout, kind: Kind) -> Iterator[Message]:
    for stage, rank in enumerate(program.ranks):
        for action, micro_batch, chunk in rank.actions():
            if action.kind is kind:
                yield message(layout, stage, action, (micro_batch, chunk))


def used_channels(program: Program, layout: Layout) -> set[Channel]:
    """The channels that the messages of any rank take."""
    return {channel for channel, _ in _messages(program, layout, Kind.SEND)}


def overtaken(program: Program, layout: Layout) -> str:
    """The first channel whose messages are received in another order than they are sent. A
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
    """Sends and receives of one rank; the event of an action holds its messages under way."""

    def __init__(self, model: RankModel, groups: Groups, memory: Memory, streams: Streams) -> None:
        self.model, self.groups, self.memory = model, groups, memory
        self.streams = streams
        self.under_way: list[Under] = []
        self.then: list[Callable[[], None]] = []
        self.posted: list[tuple[dist.Work, Tensor]] = []
        self.tied = model.parameters.get("embedding.weight")
        ends = (0, model.problem.layout.pp - 1)
        exchanged = model.kind.tied_embeddings and ends[1] > 0 and model.place.pp in ends
        self.arrival: Tensor | None = None
        if exchanged and self.tied is not None:
            self.arrival = torch.empty_like(self.tied.grad_flat)

    def states(self) -> list[Tensor]:
        """The storages here that are not activations."""
        return [] if self.arrival is None else [self.arrival]

    def attach(self, mark: Mark) -> None:
        """Make an event wait for the messages issued since the last event."""
        mark.works, self.under_way = self.under_way, []
        mark.then, self.then = self.then, []

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
        if self.groups.buffered:
            self._post(data, found)
        else:
            self._begin(found, self._send(data, found))

    def _begin(self, found: Message, work: dist.Work) -> None:
        self.under_way.append(self.streams.under_way(found.channel, work))

    def _send(self, data: Tensor, found: Message) -> dist.Work:
        channel = found.channel
        return self.groups.send(data, channel.receiver, channel.direction, found.tag)

    def _receive(self, data: Tensor, found: Message) -> None:
        channel = found.channel
        work = self.groups.receive(data, channel.sender, channel.direction, found.tag)
        self._begin(found, work)

    def _post(self, data: Tensor, found: Message) -> None:
        """Send a copy on gloo. Gloo's send ends when the receiver is ready and holds the host until
        then, where a GPU's host would go on issuing. The copy is transport memory, outside the
        ledger; the action's event is complete at once."""
        with _disable_current_modes():
            copy = data.clone()
        self.posted.append((self._send(copy, found), copy))

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
        tensor = self.model.chunks[span.chunk].boundary
        columns = tensor.row_bytes // self.model.dtype.itemsize
        data = torch.empty(tensor.rows, columns, dtype=self.model.dtype, device=self.model.device)
        self._receive(data, self._message(action, span))
        whole = Value(data, 0, self.model.shapes.shard_tokens)
        self.memory.put(span.key(action.allocs[0].name), whole)

    def _send_tied(self, found: Message) -> None:
        tied, arrival = self.tied, self.arrival
        assert tied is not None
        assert arrival is not None
        self._begin(found, self._send(tied.grad_flat, found))
        self.then.append(partial(_add, tied.grad_flat, arrival))


def _add(total: Tensor, arrived: Tensor) -> None:
    total.add_(arrived)
