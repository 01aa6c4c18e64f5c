"""Renames actions for the next layer or the next piece."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from rematbench.engine.program.action import (
    Action,
    Alloc,
    Kind,
    event_number,
    in_layer,
    in_piece,
    is_local,
    later_event,
)


class Renaming(dict[str, str]):
    """New names of storages, parts and events, by old name.  `new` computes them."""

    def __init__(self, new: Callable[[str], str]) -> None:
        super().__init__()
        self._new = new

    def __missing__(self, name: str) -> str:
        found = self[name] = self._new(name)
        return found

    def of(self, actions: Iterable[Action]) -> list[Action]:
        """Return the actions with the new names."""
        return [self._of(action) for action in actions]

    def _of(self, action: Action) -> Action:
        if action.kind is Kind.WAIT:
            return replace(action, wait=self[action.wait], event=self[action.event])
        frees = tuple([self[name] for name in action.frees])
        if action.kind is Kind.FREE:
            return replace(action, frees=frees)
        return replace(
            action,
            part=self[action.part],
            op=self[action.op],  # a storage where a gradient's memory is allocated
            reads=tuple([self[name] for name in action.reads]),
            allocs=tuple([Alloc(self[new.name], new.nbytes, new.slot) for new in action.allocs]),
            frees=frees,
            event=self[action.event],
            begin=self[action.begin],
            wait=self[action.wait],
        )


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
        """Return the actions with the new names."""
        return Renaming(self.name).of(actions)

    def name(self, name: str) -> str:
        """Return the new name of a storage, a part or an event."""
        if is_local(name):
            return later_event(name, self.events)
        words = in_layer(name)
        if words is None or words[1] <= self.low:
            return name
        before, number, after = words
        return f"{before}{number + (self.layers if number < self.high else self.above)}{after}"


class PieceShift(NamedTuple):
    """A renaming that adds `pieces` to the numbers of pieces, and `events` to the numbers of the
    block's events.  `offset`: the share of rows before the piece; `works_on_piece`: for each
    action, whether it works on the piece's rows."""

    pieces: int
    events: int
    offset: float
    works_on_piece: Sequence[bool]

    def of(self, actions: Sequence[Action]) -> list[Action]:
        """Return the actions with the new names and rows."""
        again = Renaming(self.name).of(actions)
        return [
            replace(action, offset=self.offset) if works_on_piece else action
            for action, works_on_piece in zip(again, self.works_on_piece, strict=True)
        ]

    def name(self, name: str) -> str:
        """Return the new name of a storage or an event."""
        if is_local(name):
            return later_event(name, self.events)
        words = in_piece(name)
        return f"{words[0]}{words[1] + self.pieces}{words[2]}" if words else name


class LayerPeriods(NamedTuple):
    """Periods of one or more equal layers.  Each period adds `layers` to the numbers of the layers
    between the two numbers of `near`."""

    layers: int
    near: tuple[int, int]

    def shift(self, number: int, events: int) -> LayerShift:
        """Return the renaming from period 0 to period `number`."""
        return LayerShift(number * self.layers, events, *self.near, 0)


class PiecePeriods(NamedTuple):
    """Periods of a single mini-sequence piece.  `offsets`: for each piece, the share of rows before
    it; `works_on_piece`: for each action, whether it works on the piece's rows."""

    offsets: tuple[float, ...]
    works_on_piece: tuple[bool, ...]

    def shift(self, number: int, events: int) -> PieceShift:
        """Return the renaming from piece 0 to piece `number`."""
        return PieceShift(number, events, self.offsets[number], self.works_on_piece)


def waits_before(actions: Iterable[Action], oldest: int) -> bool:
    """Whether an action waits for an event with a number below `oldest`."""
    return any(is_local(a.wait) and event_number(a.wait) < oldest for a in actions)
