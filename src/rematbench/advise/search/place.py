"""The entries of a search's queue: a layout, an arm, and the next work on it."""

from typing import Literal, NamedTuple

from msgspec import Struct

from rematbench.advise.search.arms import Arm
from rematbench.advise.search.shard import Shard
from rematbench.advise.search.site import Site
from rematbench.advise.search.space import Choice
from rematbench.worlds.packages.flags import Engines

Stage = Literal[
    "shard", "layout", "root", "grow", "expand", "made", "pieces", "closed", "tight"
]  # fmt: skip
"""The next work on an entry of the queue.  shard: read the shard's facts; layout: begin with the
tree's roots there; root: bound a root; grow: bound the expansion of an arm with a line, which may
fit at a smaller share with one more method; expand: add a method to an arm that does not fit; made:
bound an arm made so; pieces: bound an arm in more pieces; closed (it has a closed-form bound):
bound it by the schedule; tight: simulate it."""

RIPE: tuple[Stage, ...] = ("closed", "tight")
"""Stages of a plan that only waits for its bound by the schedule, or to be simulated."""

BEGINNING: tuple[Stage, ...] = ("layout", "root")
"""Stages of little work: they compare bounds that many layouts share."""


class Place(Struct):
    """A layout during the search, and its index in its shard.  `fits`: the least step of its line
    at which an arm fits, in as few pieces as it has; `families`:
    whether a family may fit; `tightened`: whether any of its arms has a bound by the schedule;
    `judged`: arms and pieces that have bounds; `known`: simulated plans, by content;
    `short`: live bytes that a step of an arm's line lacked; `flat`: steps that fit in no pieces;
    `ends`: a line's least step that host memory cannot hold; `refused`: arms without a plan at any
    step and in any pieces; `counted`: the layout has a plan faster than `faster_than_s`."""

    shard: Shard
    index: int
    fits: dict[Arm, int]
    families: dict[tuple[Arm, Arm | None], bool] = {}
    tightened: bool = False
    engines: Engines | None = None
    judged: set[tuple[Arm, int]] = set()
    known: set[bytes] = set()
    short: dict[tuple[Arm, int], float] = {}
    flat: set[tuple[Arm, int]] = set()
    ends: dict[Arm, int] = {}
    refused: set[Arm] = set()
    counted: bool = False

    @property
    def choice(self) -> Choice:
        """The layout and its layers."""
        return self.shard.choices[self.index]

    @property
    def site(self) -> Site:
        """What all searches know of the layout."""
        return self.shard.site(self.index)


class Item(Struct, frozen=True):
    """An entry of the queue: its next work, and the arm at a step of its line and of its pieces."""

    stage: Stage
    place: Place | None
    shard: Shard | None
    arm: Arm
    step: int = 1
    pieces: int = 1


class Fallen(NamedTuple):
    """An arm that fell unprobed at a layout: the bytes that it lacks at least, and whether in host
    memory."""

    nbytes: float
    host: bool
    place: Place
    arm: Arm


def in_one_piece(arm: Arm) -> Arm:
    """The arm without its pieces."""
    return arm.without(arm.pieces) if arm.pieces else arm


def most_pieces(arm: Arm) -> int:
    """The number of values of an arm's pieces; 1 for an arm without pieces."""
    scalar = arm.pieces.scalar if arm.pieces else None
    return len(scalar.values) if scalar else 1
