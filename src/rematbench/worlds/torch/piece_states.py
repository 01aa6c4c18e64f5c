"""A rank's optimizer states in pieces: resident, updated on the host, or visiting the device.

The rank's shards lie one after another, from the last parameter to the first, and each piece is a
range of them that may begin and end inside a parameter. The states of a piece (master weights and
two moments) are one buffer, so that a visit is one copy.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rematbench.engine.program.action import GRADIENTS_DOWN, STATES_DOWN, STATES_UP, Action
from rematbench.engine.program.storage import ModelPart, part_of
from rematbench.plan import Piece
from rematbench.worlds.torch.parameters import AdamW, Parameter, adamw, host_memory
from rematbench.worlds.torch.storages import ExecutionError, Memory, Span, Value
from rematbench.worlds.torch.streams import Streams

STATES = 3


class Range(NamedTuple):
    """Elements [first, last) of this rank's shard of a parameter, at element `at` of a piece."""

    parameter: Parameter
    first: int
    last: int
    at: int

    def of(self, piece: Tensor) -> Tensor:
        return piece[self.at : self.at + self.last - self.first]

    @property
    def gradient(self) -> Tensor:
        return self.parameter.own_grad[self.first : self.last]

    @property
    def weights(self) -> Tensor:
        return self.parameter.own_value[self.first : self.last]


def ranges_of(pieces: Sequence[Piece], parameters: Sequence[Parameter]) -> list[list[Range]]:
    """The ranges of each piece; ExecutionError unless they cover the rank's shards."""
    found: list[list[Range]] = [[] for _ in pieces]
    start = 0
    for parameter in reversed(parameters):
        stop = start + parameter.stop - parameter.start
        for piece, ranges in zip(pieces, found, strict=True):
            if piece.within(start, stop):
                first, last = max(piece.start, start), min(piece.start + piece.count, stop)
                ranges.append(Range(parameter, first - start, last - start, first - piece.start))
        start = stop
    total = sum(piece.count for piece in pieces)
    if total != start:
        raise ExecutionError(f"pieces have {total} elements, but this rank's shards have {start}")
    return found


class PieceStates:
    """The states of one piece in their home memory. A piece that is updated on the host also has
    host buffers for its gradients and new weights, unless these are in host memory anyway."""

    def __init__(self, piece: Piece, ranges: list[Range], *, arrives: bool, leaves: bool) -> None:
        self.piece, self.ranges = piece, ranges
        first = ranges[0].parameter
        device, wide, narrow = first.flat.device, first.master.dtype, first.flat.dtype
        self.device, count = device, piece.count
        hosted = piece.place == "host"
        self.states = torch.zeros(STATES * count, dtype=wide, device=device)
        for each in ranges:
            each.of(self.states[:count]).copy_(each.parameter.master[each.first : each.last])
        self.gradients = torch.zeros(count * (hosted and arrives), dtype=wide, device=device)
        self.weights = torch.zeros(count * (hosted and leaves), dtype=narrow, device=device)
        self.arrives, self.leaves = hosted and arrives, hosted and leaves
        if piece.place != "device":
            self.states = host_memory(self.states, device)
            self.gradients = host_memory(self.gradients, device)
            self.weights = host_memory(self.weights, device)

    def tensors(self) -> list[Tensor]:
        return [self.states, self.gradients, self.weights]

    def update(self, states: Tensor, rule: AdamW, step: int) -> None:
        """One AdamW step on `states`: the piece's states at home, or their copy on the device."""
        count = self.piece.count
        for each in self.ranges:
            gradient = each.of(self.gradients) if self.arrives else each.gradient
            parts = [each.of(states[at * count : (at + 1) * count]) for at in range(STATES)]
            adamw(parts[0], parts[1], parts[2], gradient, rule, step)
            (each.of(self.weights) if self.leaves else each.weights).copy_(parts[0])


class Pieces:
    def __init__(
        self,
        pieces: Sequence[Piece],
        parameters: Sequence[Parameter],
        *,
        gradients_on_host: bool,
        weights_on_host: bool,
    ) -> None:
        self.states = [
            PieceStates(piece, ranges, arrives=not gradients_on_host, leaves=not weights_on_host)
            for piece, ranges in zip(pieces, ranges_of(pieces, parameters), strict=True)
        ]
        for parameter in parameters:
            parameter.give_states_away()

    def at_home(self, *, on_host: bool) -> list[Tensor]:
        found = [each for each in self.states if (each.piece.place != "device") == on_host]
        return [tensor for each in found for tensor in each.tensors()]

    @property
    def last(self) -> ModelPart:
        """The part of the model that stands for the last piece, whose gradients are ready last."""
        return part_of("P", len(self.states) - 1)

    def of(self, part: ModelPart) -> PieceStates:
        return self.states[part.number]

    def updating(
        self, action: Action, span: Span, memory: Memory, rule: AdamW, step: int
    ) -> Callable[[], None]:
        """The function that updates a piece's states at home, or their copy on the device."""
        piece = self.of(action.part)
        states = memory[span.key(action.reads[0])].data if action.reads else piece.states
        return lambda: piece.update(states, rule, step)

    def to_host(self, action: Action, span: Span, memory: Memory, streams: Streams) -> None:
        """Copy gradients to the host for an update there, or the states of a visit back home."""
        piece = self.of(action.part)
        if action.op == GRADIENTS_DOWN:
            for each in piece.ranges:
                _copy(streams, action.stream, each.of(piece.gradients), each.gradient)
            return
        assert action.op == STATES_DOWN
        _copy(streams, action.stream, piece.states, memory[span.key(action.reads[0])].data)

    def to_device(self, action: Action, span: Span, memory: Memory, streams: Streams) -> None:
        """Copy states to the device for a visit, or weights after an update on the host."""
        piece = self.of(action.part)
        if action.op != STATES_UP:
            for each in piece.ranges:
                _copy(streams, action.stream, each.weights, each.of(piece.weights))
            return
        home = piece.states
        with streams.storage_pool():
            room = torch.empty(home.shape, dtype=home.dtype, device=piece.device)
        streams.run(action.stream, lambda: room.copy_(home, non_blocking=True), room)
        memory.put(span.key(action.allocs[0].storage), Value(room))


def _copy(streams: Streams, stream: str, target: Tensor, source: Tensor) -> None:
    streams.run(stream, lambda: target.copy_(source, non_blocking=True))
