"""Actions taken apart, to be written again and again with other names."""

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from msgspec.structs import replace

from rematbench.program.action import Action, Alloc, Kind, event_number, is_local

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
