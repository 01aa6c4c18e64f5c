"""What an action takes: the protocol between the simulation and the costs."""

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol, runtime_checkable

from rematbench.engine.program.action import Action, Kind

TIMELESS = (Kind.FREE, Kind.ALLOC, Kind.RECV)
"""Kinds of actions that the simulation leaves out (a RECV's event is the message's arrival)."""

STILL = (Kind.WAIT, Kind.EVENT)
"""Kinds of actions that order streams but take no time themselves."""

Seconds = Callable[[Action, int], float]
"""(action, rank) -> seconds of the action on its stream."""


class Timing(NamedTuple):
    """What an action takes: seconds on its stream, seconds of the host to issue it, and whether the
    host then waits until the action has ended (`held`)."""

    seconds: float
    issue: float
    held: bool


NOTHING = Timing(0.0, 0.0, held=False)


@runtime_checkable
class RankedSeconds(Protocol):
    """Costs of actions that also say which ranks have equal costs (those ranks share compiled
    blocks), and what the host's issuing takes."""

    def __call__(self, action: Action, rank: int) -> float:
        """Seconds of the action on its stream."""
        ...

    def alike(self, rank: int) -> Hashable:
        """A key that is equal for ranks on which every action takes the same time."""
        ...

    def timing(self, action: Action, rank: int) -> Timing:
        """What the action takes on its stream and of the host; an action that only orders streams
        (STILL) takes no time."""
        ...


def timings(seconds: Seconds) -> Callable[[Action, int], Timing]:
    """The timings of actions by their costs; costs that know no host have one that issues at
    once."""
    if isinstance(seconds, RankedSeconds):
        return seconds.timing
    return lambda action, rank: Timing(
        0.0 if action.kind in STILL else seconds(action, rank), 0.0, held=False
    )
