"""A piece of a mini-sequence that stands for further pieces, in a block that is being written."""

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from rematbench.engine.program.action import Action
from rematbench.engine.program.program import Periods
from rematbench.engine.program.template import Pieces

Frees = dict[int, list[str]]
"""The tensors that are freed after an action, by the action's index."""


class Place(NamedTuple):
    """A place in a block: the index of the next action, the number of the next event."""

    action: int
    event: int

    def behind(self, end: int, more: int) -> "Place":
        """The place after `more` actions were put in at index `end`."""
        return Place(self.action + more, self.event) if self.action >= end else self


class Again(NamedTuple):
    """The piece between `start` and `end`, which stands for `pieces`: itself and later ones.
    `before`: where the piece before it starts, whose actions are the same but for names and
    rows."""

    pieces: Pieces
    before: Place
    start: Place
    end: Place

    @property
    def places(self) -> tuple[Place, Place, Place]:
        """Where the piece before, this piece, and the next one start."""
        return self.before, self.start, self.end

    @property
    def periods(self) -> Periods:
        """The pieces as periods of the block as it is written so far, without FREEs."""
        (start, event), (end, last) = self.start, self.end
        times = len(self.pieces.offsets)
        return Periods(start, end - start, times, event, last - event, self.pieces)

    def behind(self, end: int, more: int) -> "Again":
        """The same after `more` actions were put in at index `end`."""
        return Again(self.pieces, *(place.behind(end, more) for place in self.places))

    def alike(self, actions: Sequence[Action], frees: Frees, elsewhere: Set[str]) -> bool:
        """Whether the piece frees what the piece before it frees, one piece later, and all that it
        makes and does not free is in `elsewhere`: ends in the same way for each piece."""
        first, start, end = (place.action for place in self.places)
        new = self.periods.shift(1).name
        before = {at + start - first: {*map(new, frees[at])} for at in frees if first <= at < start}
        here = {at: {*frees[at]} for at in frees if start <= at < end}
        return before == here and self._born(actions) <= elsewhere | self._gone(actions, frees)

    def deaths(self, actions: Sequence[Action], frees: Frees) -> set[str]:
        """What the piece frees and did not make."""
        return self._gone(actions, frees) - self._born(actions)

    def take_deaths(self, actions: Sequence[Action], frees: Frees) -> None:
        """Take from `frees` what the later pieces free: no written action reads it, so it would be
        freed where it was made, or at the block's end."""
        deaths = self.deaths(actions, frees)
        later = {shift.name(name) for shift in self.periods.shifts for name in deaths}
        for at, names in [*frees.items()] if later else ():
            left = [name for name in names if name not in later]
            if left:
                frees[at] = left
            else:
                del frees[at]

    def finished(self, moved: Callable[[Place], Place], frees: Frees) -> Periods:
        """The periods of the finished block.  `moved`: a place there."""
        start, end = moved(self.start).action, moved(self.end).action
        own: list[bool] = []
        for at, flag in enumerate(self.pieces.own, self.start.action):
            own += [flag, False] if at in frees else [flag]
        pieces = self.pieces._replace(own=tuple(own))
        return self.periods._replace(start=start, length=end - start, of=pieces)

    def _born(self, actions: Sequence[Action]) -> set[str]:
        here = actions[self.start.action : self.end.action]
        return {alloc.name for action in here for alloc in action.allocs}

    def _gone(self, actions: Sequence[Action], frees: Frees) -> set[str]:
        here = range(self.start.action, self.end.action)
        found = {name for at in here for name in actions[at].frees}
        return found.union(*(frees[at] for at in here if at in frees))
