"""A mini-sequence piece that stands for later pieces too, in an unfinished block."""

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from rematbench.engine.program.action import Action
from rematbench.engine.program.program import Periods
from rematbench.engine.program.storage import Storage
from rematbench.engine.program.template import PiecePeriods

Frees = dict[int, list[Storage]]


class Position(NamedTuple):
    """A place in a block: the index of the next action, and the number of the next event."""

    action: int
    event: int

    def after_insert(self, end: int, count: int) -> "Position":
        """Return the position after `count` actions are inserted at index `end`."""
        return Position(self.action + count, self.event) if self.action >= end else self


class RepeatedPiece(NamedTuple):
    """The piece between `start` and `end`, which stands for `pieces`: itself and later pieces.
    `before`: the start of the previous piece, which differs only in names and rows."""

    pieces: PiecePeriods
    before: Position
    start: Position
    end: Position

    @property
    def starts(self) -> tuple[Position, Position, Position]:
        return self.before, self.start, self.end

    @property
    def periods(self) -> Periods:
        """The pieces as periods of the unfinished block, which has no FREEs yet."""
        (start, event), (end, last) = self.start, self.end
        times = len(self.pieces.offsets)
        return Periods(start, end - start, times, event, last - event, self.pieces)

    def after_insert(self, end: int, count: int) -> "RepeatedPiece":
        return RepeatedPiece(
            self.pieces, *(start.after_insert(end, count) for start in self.starts)
        )

    def frees_alike(self, actions: Sequence[Action], frees: Frees, outside: Set[Storage]) -> bool:
        """Whether the pieces free alike: this piece must free the same tensors as the previous
        piece, with the next piece's number, and all that it allocates but does not free must be in
        `outside`."""
        first, start, end = (place.action for place in self.starts)
        new = self.periods.shift(1).storage
        before = {at + start - first: {*map(new, frees[at])} for at in frees if first <= at < start}
        here = {at: {*frees[at]} for at in frees if start <= at < end}
        return before == here and self._born(actions) <= outside | self._gone(actions, frees)

    def deaths(self, actions: Sequence[Action], frees: Frees) -> set[Storage]:
        return self._gone(actions, frees) - self._born(actions)

    def remove_later_deaths(self, actions: Sequence[Action], frees: Frees) -> None:
        """Remove the tensors that the later pieces free from `frees`. The readers of these tensors
        are not written, so `frees` has them too early, or at the block's end."""
        deaths = self.deaths(actions, frees)
        later = {shift.storage(dead) for shift in self.periods.shifts for dead in deaths}
        for at, freed in [*frees.items()] if later else ():
            if left := [storage for storage in freed if storage not in later]:
                frees[at] = left
            else:
                del frees[at]

    def finished(self, moved: Callable[[Position], Position], frees: Frees) -> Periods:
        """Return the pieces as periods of the finished block, to which `moved` maps positions."""
        start, end = moved(self.start).action, moved(self.end).action
        works_on_piece: list[bool] = []
        for at, flag in enumerate(self.pieces.works_on_piece, self.start.action):
            works_on_piece += [flag, False] if at in frees else [flag]
        pieces = self.pieces._replace(works_on_piece=tuple(works_on_piece))
        return self.periods._replace(start=start, length=end - start, naming=pieces)

    def _born(self, actions: Sequence[Action]) -> set[Storage]:
        here = actions[self.start.action : self.end.action]
        return {alloc.storage for action in here for alloc in action.allocs}

    def _gone(self, actions: Sequence[Action], frees: Frees) -> set[Storage]:
        here = range(self.start.action, self.end.action)
        found = {freed for at in here for freed in actions[at].frees}
        return found.union(*(frees[at] for at in here if at in frees))
