"""The queue of a search: its entries, in the order of their bounds or with the leanest first."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import count
from math import inf, nextafter
from typing import Generic, Literal, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from rematbench.advise.search.candidates import KEEP, Candidate, Tree
from rematbench.advise.search.shard_bounds import ShardBounds
from rematbench.advise.search.shards import Shard
from rematbench.advise.search.space import Choice
from rematbench.advise.search.trials import Site
from rematbench.worlds.packages.flags import Engines

Stage = Literal[
    "shard", "layout", "grow", "expand", "compose", "pieces", "tighten", "simulate"
]  # fmt: skip
"""The next work on an entry of the queue.  shard: read the shard's facts; layout: judge the tree's
roots there; grow: bound the expansion of a candidate with a share, which may fit at a smaller share
with one more method; expand: add a method to a candidate that does not fit; compose: bound a
candidate that was expanded so; pieces: bound a candidate in more pieces; tighten: bound by the
schedule a candidate with a closed-form bound; simulate: simulate it."""


RIPE: tuple[Stage, ...] = ("tighten", "simulate")
"""Stages of a plan that only waits for its bound by the schedule, or to be simulated."""


class Place(Struct):
    """A layout during the search: the bounds of its shard, and its index there.  `fits`: the lowest
    step of its share at which a candidate fits, in as few pieces as it has; `holds`: whether the
    smallest plan may fit (None: unknown); `tightened`: whether any of its candidates has a bound by
    the schedule; `judged`: candidates and pieces that have bounds; `simulated`: plans, by content;
    `short`: live bytes that a step of a candidate's share lacked; `flat`: steps that fit in no
    pieces; `ends`: a share's lowest step that host memory cannot hold; `refused`: candidates
    without a plan at any step and in any pieces; `counted`: the layout has a plan faster than
    `faster_than_s`."""

    bounds: ShardBounds
    index: int
    fits: dict[Candidate, int]
    holds: bool | None = None
    tightened: bool = False
    engines: Engines | None = None
    judged: set[tuple[Candidate, int]] = set()
    simulated: set[bytes] = set()
    short: dict[tuple[Candidate, int], float] = {}
    flat: set[tuple[Candidate, int]] = set()
    ends: dict[Candidate, int] = {}
    refused: set[Candidate] = set()
    counted: bool = False

    @property
    def shard(self) -> Shard:
        """The layout's shard."""
        return self.bounds.shard

    @property
    def choice(self) -> Choice:
        """The layout and its layers."""
        return self.shard.choices[self.index]

    @property
    def site(self) -> Site:
        """The layout's Site, with the results of all searches so far."""
        return self.shard.site(self.index)


class Item(Struct, frozen=True):
    """An entry of the queue: its next work, and the candidate at a step of its share and of its
    pieces.  `bounds`: the bounds of the shard, if the entry is not for a single layout."""

    stage: Stage
    place: Place | None
    bounds: ShardBounds | None
    candidate: Candidate
    step: int = 1
    pieces: int = 1


class Unprobed(NamedTuple):
    """A candidate that was excluded at a layout without a probe: the fewest bytes that it may lack,
    and whether they are host bytes."""

    nbytes: float
    host: bool
    place: Place
    candidate: Candidate


def in_one_piece(candidate: Candidate) -> Candidate:
    """The candidate without its pieces."""
    return candidate.without(candidate.pieces) if candidate.pieces else candidate


def most_pieces(candidate: Candidate) -> int:
    """The number of values of a candidate's pieces; 1 for a candidate without pieces."""
    scalar = candidate.pieces.scalar if candidate.pieces else None
    return len(scalar.values) if scalar else 1


T = TypeVar("T")


Entry = tuple[float, int, T]


class Queue(Generic[T]):
    """Entries in the order of their bounds; entries of equal bounds in the order of arrival. *Ripe*
    entries are also in a second queue, of ripe entries only."""

    def __init__(self) -> None:
        self._all: list[Entry[T]] = []
        self._ripe: list[Entry[T]] = []
        self._waiting: set[int] = set()
        self._numbers = count()

    def push(self, bound: float, item: T, *, ripe: bool) -> None:
        """Add an entry."""
        entry = (bound, next(self._numbers), item)
        self._waiting.add(entry[1])
        heapq.heappush(self._all, entry)
        if ripe:
            heapq.heappush(self._ripe, entry)

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self) -> Iterator[tuple[float, T]]:
        """The entries with their bounds, in any order."""
        return ((bound, item) for bound, number, item in self._all if number in self._waiting)

    @property
    def bound(self) -> float:
        """The lowest bound; infinite for an empty queue."""
        self._drop(self._all)
        return self._all[0][0] if self._all else float("inf")

    @property
    def ripe_bound(self) -> float:
        """The lowest bound of a ripe entry; infinite if no ripe entry waits."""
        self._drop(self._ripe)
        return self._ripe[0][0] if self._ripe else float("inf")

    def pop(self, *, ripe: bool = False) -> tuple[float, T]:
        """Remove and return the entry with the lowest bound, of all entries or of the ripe entries.
        Raises IndexError if there is no such entry."""
        heap = self._ripe if ripe else self._all
        self._drop(heap)
        bound, number, item = heapq.heappop(heap)
        self._waiting.remove(number)
        return bound, item

    def _drop(self, heap: list[Entry[T]]) -> None:
        """Remove entries from the front of an order that were taken by the other order."""
        while heap and heap[0][1] not in self._waiting:
            heapq.heappop(heap)


LATER = 1e6
"""Added to the order of work that waits for all leaner work."""


class LeanOrder:
    """The order of a search for any plan that fits: the leanest layouts and plans come first.
    `searched`: layouts whose candidates are judged.  `waiting`: entries of the queue by layout.
    `doubts`: by layout, candidates left out for a reason other than a sure lack of bytes (more
    sequences in a micro-batch may change that reason)."""

    def __init__(self, tree: Tree) -> None:
        self.searched: set[Choice] = set()
        self.waiting: Counter[Choice] = Counter()
        self.doubts: dict[Choice, list[Candidate]] = defaultdict(list)
        self._lean = set(tree.leanest)

    def of(self, item: Item) -> float:
        """Order lean layouts first, and on all layouts the leanest candidates first.  Layouts for
        which a leaner layout exists come last."""
        if item.place is None:
            assert item.bounds is not None
            shares = item.bounds.minimum.shares[item.bounds.shard.states_over_bytes <= 0]
            return float(shares.min()) + 2 * LATER * (item.step - 1)
        order = float(item.place.bounds.minimum.shares[item.place.index])
        first = item.candidate in self._lean or item.candidate == KEEP
        less = leaner(item.place.choice)
        return order + (0.0 if first else LATER) + (0.0 if less is None else 2 * LATER)


def leaner(choice: Choice) -> Choice | None:
    """Return the same layout with micro-batch 1, if it needs no more bytes under any plan: both
    have as many passes in flight, and gradients of several micro-batches to add up."""
    lay = choice.layout
    if lay.micro_batch == 1 or lay.num_micro_batches <= lay.pp:
        return None
    return replace(choice, layout=replace(lay, micro_batch=1))


SHOWN = 1.1
"""Before a listing, work whose bound is at least this multiple of the best step is not queued."""


class SearchQueue:
    """The queue of a search, in the order of bounds of seconds, or in a `lean` order.  It rejects
    work whose bound is too far above `best_s`, the best step so far.  With `lists` it keeps such
    work aside for `list_all`.  With `faster_than_s` all work below that step counts."""

    def __init__(
        self, *, faster_than_s: float = inf, lists: bool = False, lean: LeanOrder | None = None
    ) -> None:
        self.entries: Queue[Item] = Queue()
        self.best_s, self.faster_than_s, self.lean = inf, faster_than_s, lean
        self.lists, self.listing = lists, False
        self._dropped: Counter[str] = Counter()
        self._aside: list[tuple[float, Item]] = []

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def bound_s(self) -> float:
        """Lower bound, in seconds, of the step of any plan in the queue.  A lean order gives no
        such bound until no plan is left."""
        if self.lean:
            return 0.0 if self.entries else inf
        return self.entries.bound

    def push(self, bound_s: float, item: Item) -> None:
        """Queue an entry, unless its bound is too high."""
        ripe = item.stage in RIPE
        if self.lean:
            self.entries.push(-1.0 if ripe else self.lean.of(item), item, ripe=ripe)
            if item.place:
                self.lean.waiting[item.place.choice] += 1
            return
        counting = self.faster_than_s < inf
        most = self.faster_than_s if counting else SHOWN * self.best_s
        if counting and item.stage == "grow" and bound_s < most:
            bound_s = nextafter(most, 0.0)  # last: few layouts are faster by that alone
        if bound_s < most or self.listing:
            self.entries.push(bound_s, item, ripe=ripe)
        else:
            _count(self._dropped, item)
            self.postpone(bound_s, item)

    def postpone(self, bound_s: float, item: Item) -> None:
        """Set aside work on plans that cannot be the fastest, until `list_all` queues it."""
        if self.listing:
            self.push(bound_s, item)
        elif self.lists:
            self._aside.append((bound_s, item))

    def list_all(self) -> None:
        """Queue the postponed work, and accept such work from now on."""
        self.listing = True
        self._dropped.clear()
        for bound_s, item in self._aside:
            self.push(bound_s, item)
        self._aside.clear()

    @property
    def slower(self) -> Counter[str]:
        """Counts of the layouts and plans whose bounds are no faster than the best step, by
        cause."""
        found = self._dropped.copy()
        for bound_s, item in self.entries.waiting():
            if bound_s >= self.best_s:
                _count(found, item)
        return found


def _count(slower: Counter[str], item: Item) -> None:
    """Count the layouts or plans of an entry of the queue by what makes them slow."""
    place = item.place
    if place is None or item.stage == "layout":
        held = int((item.bounds.shard.states_over_bytes <= 0).sum()) if item.bounds else 1
        slower["layouts slower than the best even if nothing is recomputed or offloaded"] += held
    else:
        slower["slower than the best: kernels, messages and copies"] += 1
