"""Actions taken apart, to be written again and again with other names."""

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from msgspec.structs import replace

from rematbench.program.action import (
    Action,
    Alloc,
    Kind,
    event_number,
    in_layer,
    is_local,
    later_event,
    local_event,
)

Names = Sequence[str]
Picker = Callable[[Names], tuple[str, ...]]
Written = Callable[[Names], Action]
"""Writes one action with new names."""


class Template:
    """Some actions: each of their names once (`names`), and for each action the places of its
    names."""

    def __init__(self, actions: Sequence[Action]) -> None:
        places: dict[str, int] = {}
        self._lines = [_line(action, places) for action in actions]
        self.names = [*places]

    def written(self, names: Names) -> list[Action]:
        """The actions with `names` in place of the template's own, in the same order."""
        return [line(names) for line in self._lines]


def _line(action: Action, places: dict[str, int]) -> Written:
    """What writes an action again: its part, operator, reads, new storages (with their bytes and
    slots), freed storages, and its events."""

    def at(name: str) -> int:
        return places.setdefault(name, len(places))

    wait, event = at(action.wait), at(action.event)
    if action.kind is Kind.WAIT:
        return lambda new: replace(action, wait=new[wait], event=new[event])
    frees = _picker([at(name) for name in action.frees])
    if action.kind is Kind.FREE:
        return lambda new: replace(action, frees=frees(new))
    part, op = at(action.part), at(action.op)  # a storage where a gradient's memory is allocated
    reads, begin = _picker([at(name) for name in action.reads]), at(action.begin)
    allocs = [(at(new.name), new.nbytes, new.slot) for new in action.allocs]
    return lambda new: replace(
        action,
        part=new[part],
        op=new[op],
        reads=reads(new),
        allocs=tuple([Alloc(new[at], nbytes, slot) for at, nbytes, slot in allocs]),
        frees=frees(new),
        event=new[event],
        begin=new[begin],
        wait=new[wait],
    )


def _picker(places: Sequence[int]) -> Picker:
    """What takes the names at these places; `itemgetter` alone gives no tuple of one name."""
    if not places:
        return lambda _: ()
    if len(places) == 1:
        (at,) = places
        return lambda names: (names[at],)
    return itemgetter(*places)


def older(actions: Iterable[Action], oldest: int) -> bool:
    """Whether an action waits for an event before the event number `oldest`."""
    return any(is_local(a.wait) and event_number(a.wait) < oldest for a in actions)


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
        names = _Names(self)
        return [names.of(action) for action in actions]

    def name(self, name: str) -> str:
        """The new name of a storage or a part."""
        words = in_layer(name)
        if words is None or words[1] <= self.low:
            return name
        before, number, after = words
        return f"{before}{number + (self.layers if number < self.high else self.above)}{after}"


class _Names(dict[str, str]):
    """The new name of each old one: of storages, parts and events."""

    def __init__(self, shift: Shift) -> None:
        super().__init__()
        self.shift = shift

    def __missing__(self, name: str) -> str:
        new = later_event(name, self.shift.events) if is_local(name) else self.shift.name(name)
        self[name] = new
        return new

    def of(self, action: Action) -> Action:
        """An action with the new names."""
        if action.kind is Kind.WAIT:
            wait, event = self[action.wait], self[action.event]
            same = wait == action.wait and event == action.event
            return action if same else replace(action, wait=wait, event=event)
        frees = tuple([self[name] for name in action.frees])
        if action.kind is Kind.FREE:
            return action if frees == action.frees else replace(action, frees=frees)
        return replace(
            action,
            part=self[action.part],
            op=self[action.op],
            reads=tuple([self[name] for name in action.reads]),
            allocs=tuple([Alloc(self[new.name], new.nbytes, new.slot) for new in action.allocs]),
            frees=frees,
            event=self[action.event],
            begin=self[action.begin],
            wait=self[action.wait],
        )


class Layers:
    """The actions of some layers, to be written again as those of other layers."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._template = Template(actions)
        names = [*enumerate(self._template.names)]
        self._layers = [at for at, name in names if in_layer(name) is not None]
        self._events = [(at, event_number(name)) for at, name in names if is_local(name)]

    def moved(self, shift: Shift) -> list[Action]:
        """The actions with the new names."""
        new = [*self._template.names]
        for at in self._layers:
            new[at] = shift.name(new[at])
        for at, number in self._events:
            new[at] = local_event(number + shift.events)
        return self._template.written(new)
