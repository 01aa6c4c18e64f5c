"""Renames the actions of a layer or a piece to those of a later layer or piece."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from rematbench.engine.program.action import Action, Alloc, Kind
from rematbench.engine.program.storage import Event, ModelPart, Storage


class LayerShift(NamedTuple):
    """A renaming that adds `events` to the numbers of the block's events, `layers` to the numbers
    of layers between `low` and `high` (both excluded), and `above` to the numbers of layers from
    `high` on."""

    layers: int
    events: int
    low: int
    high: int
    above: int

    def of(self, actions: Sequence[Action]) -> list[Action]:
        return [renamed(action, self) for action in actions]

    def storage(self, storage: Storage) -> Storage:
        by = self._by(storage.part)
        return storage.later(by) if by else storage

    def part(self, part: ModelPart) -> ModelPart:
        by = self._by(part)
        return part.later(by) if by else part

    def _by(self, part: ModelPart) -> int:
        number = part.number
        if number <= self.low or part.letter != "L":
            return 0
        return self.layers if number < self.high else self.above


class PieceShift(NamedTuple):
    """A renaming that adds `pieces` to the numbers of pieces, and `events` to the numbers of the
    block's events. `offset`: the new share of rows before the piece; `works_on_piece`: for each
    action, whether it works on the piece's rows, so that its rows change too."""

    pieces: int
    events: int
    offset: float
    works_on_piece: Sequence[bool]

    def of(self, actions: Sequence[Action]) -> list[Action]:
        again = [renamed(action, self) for action in actions]
        return [
            replace(action, rows=replace(action.rows, offset=self.offset)) if of_piece else action
            for action, of_piece in zip(again, self.works_on_piece, strict=True)
        ]

    def storage(self, storage: Storage) -> Storage:
        piece = storage.piece
        return storage if piece is None else storage.of_piece(piece + self.pieces)

    def part(self, part: ModelPart) -> ModelPart:
        return part


class Renaming(Protocol):
    """New names for storages and parts, and a number to add to the numbers of a block's events."""

    @property
    def events(self) -> int: ...

    def storage(self, storage: Storage) -> Storage: ...

    def part(self, part: ModelPart) -> ModelPart: ...


def renamed(action: Action, shift: Renaming) -> Action:
    kind, events, new = action.kind, shift.events, shift.storage
    event = _later(action.event, events)
    if kind is Kind.WAIT:
        return replace(action, wait=_later(action.wait, events), event=event)
    frees = tuple([new(storage) for storage in action.frees])
    if kind is Kind.FREE:
        return replace(action, frees=frees)
    allocs = tuple([Alloc(new(each.storage), each.nbytes, each.slot) for each in action.allocs])
    op, exchange = action.op, action.exchange
    if kind is Kind.ALLOC and allocs[0].storage.is_gradient:
        op = allocs[0].storage.text
    if exchange.begin is not None:
        exchange = replace(exchange, begin=exchange.begin.later(events))
    return replace(
        action,
        part=shift.part(action.part),
        op=op,
        reads=tuple([new(storage) for storage in action.reads]),
        allocs=allocs,
        frees=frees,
        event=event,
        exchange=exchange,
    )


def _later(event: Event | None, by: int) -> Event | None:
    return None if event is None else event.later(by)


class LayerPeriods(NamedTuple):
    """Periods of one or more equal layers. Each period adds `layers` to the numbers of layers
    between the two numbers of `near`."""

    layers: int
    near: tuple[int, int]

    def shift(self, number: int, events: int) -> LayerShift:
        return LayerShift(number * self.layers, events, *self.near, 0)


class PiecePeriods(NamedTuple):
    """Periods of one mini-sequence piece each. `offsets`: for each piece, the share of rows before
    it; `works_on_piece`: for each action, whether it works on the piece's rows."""

    offsets: tuple[float, ...]
    works_on_piece: tuple[bool, ...]

    def shift(self, number: int, events: int) -> PieceShift:
        return PieceShift(number, events, self.offsets[number], self.works_on_piece)


def waits_before(actions: Iterable[Action], oldest: int) -> bool:
    return any(a.wait is not None and 0 <= a.wait.number < oldest for a in actions)
