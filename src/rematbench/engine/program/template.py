"""Actions written again with other names."""

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
    """The new name of each old one, by `new`: of storages, parts and events."""

    def __init__(self, new: Callable[[str], str]) -> None:
        super().__init__()
        self._new = new

    def __missing__(self, name: str) -> str:
        found = self[name] = self._new(name)
        return found

    def of(self, actions: Iterable[Action]) -> list[Action]:
        """The actions with the new names."""
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


class Shift(NamedTuple):
    """New names: numbers of the block's events move up by `events`, numbers of layers between `low`
    and `high` by `layers`, from `high` on by `above`."""

    layers: int
    events: int
    low: int
    high: int
    above: int

    def of(self, actions: Sequence[Action]) -> list[Action]:
        """The actions with the new names."""
        return Renaming(self.name).of(actions)

    def name(self, name: str) -> str:
        """The new name of a storage, a part or an event."""
        if is_local(name):
            return later_event(name, self.events)
        words = in_layer(name)
        if words is None or words[1] <= self.low:
            return name
        before, number, after = words
        return f"{before}{number + (self.layers if number < self.high else self.above)}{after}"


class Later(NamedTuple):
    """The names of a piece that is `pieces` later: numbers of pieces are as much higher, numbers of
    the block's events by `events`.  `offset`: the share of rows before the piece; `own`: for each
    action whether it works on the piece's rows."""

    pieces: int
    events: int
    offset: float
    own: Sequence[bool]

    def of(self, actions: Sequence[Action]) -> list[Action]:
        """The actions with the new names and rows."""
        again = Renaming(self.name).of(actions)
        return [
            replace(action, offset=self.offset) if own else action
            for action, own in zip(again, self.own, strict=True)
        ]

    def name(self, name: str) -> str:
        """The new name of a storage or an event."""
        if is_local(name):
            return later_event(name, self.events)
        words = in_piece(name)
        return f"{words[0]}{words[1] + self.pieces}{words[2]}" if words else name


class Layers(NamedTuple):
    """Periods of one or a few equal layers: numbers of the layers between those of `near` are
    higher by `layers` than those of the period before."""

    layers: int
    near: tuple[int, int]

    def shift(self, number: int, events: int) -> Shift:
        """The names of period `number`, from those of period 0."""
        return Shift(number * self.layers, events, *self.near, 0)


class Pieces(NamedTuple):
    """Periods of one piece of a mini-sequence.  `offsets`: of each piece, the share of rows before
    it; `own`: for each action whether it works on the piece's rows."""

    offsets: tuple[float, ...]
    own: tuple[bool, ...]

    def shift(self, number: int, events: int) -> Later:
        """The names of piece `number`, from those of piece 0."""
        return Later(number, events, self.offsets[number], self.own)


def older(actions: Iterable[Action], oldest: int) -> bool:
    """Whether an action waits for an event before the event number `oldest`."""
    return any(is_local(a.wait) and event_number(a.wait) < oldest for a in actions)
