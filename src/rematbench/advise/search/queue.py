"""The queue of a search, ordered by bounds of seconds or with the leanest plans first."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from math import inf, nextafter
from operator import itemgetter
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from rematbench.advise.bounds.columns import Array, Bounds, Short
from rematbench.advise.bounds.lines import Probe, Refused
from rematbench.advise.candidates.candidate import KEEP, Candidate
from rematbench.advise.candidates.layouts import LayoutChoice
from rematbench.advise.candidates.trials import NO_PLAN, LayoutTrials, Trial
from rematbench.problem import Problem
from rematbench.worlds.packages.flags import Engines

Stage = Literal[
    "alike", "group", "layout", "grow", "expand", "compose", "pieces", "tighten", "simulate"
]  # fmt: skip
"""The next work on an entry of the queue.  alike: make and bound groups whose bounds follow from
one; group: read the facts of a group; layout: judge the
roots of the family at a layout; grow: bound the expansion of a candidate with a share, which may
fit at a smaller share with one more method; expand: add methods to a candidate that does not fit;
compose: bound a candidate with an added method; pieces: bound a candidate in more pieces; tighten:
bound a candidate by its whole schedule; simulate: simulate it."""
RIPE: tuple[Stage, ...] = ("tighten", "simulate")
"""The stages in which an entry is a single plan, to be bounded by its schedule or simulated."""


class BoundedGroup(Protocol):
    """The numbers of a layout group that a search reads, which `GroupBounds` documents."""

    choices: Sequence[LayoutChoice]
    problem: Problem

    @property
    def states_over_bytes(self) -> Array: ...
    @property
    def usable_bytes(self) -> NDArray[np.int64]: ...
    @property
    def lean_shares(self) -> Array: ...
    @property
    def probed_layers(self) -> int: ...
    def kernels_s(self, *, any_order: bool = False, alike: bool = False) -> Array: ...
    def of(self, candidate: Candidate, pieces: int = 1) -> Bounds | Refused: ...
    def short(self, candidate: Candidate) -> Short | None: ...
    def least_bytes(self, pieces: Candidate | None) -> Array: ...
    def in_more_pieces(self, candidate: Candidate, fewer: int, pieces: int, more: int) -> Array: ...
    def tight_s(self, candidate: Candidate, step: int, pieces: int, index: int) -> float: ...
    def probe(self, candidate: Candidate, pieces: int = 1) -> Probe | Refused: ...
    def steps(self, candidate: Candidate) -> int: ...
    def trials_at(self, index: int) -> LayoutTrials: ...


class Alike(NamedTuple):
    """Groups of layouts that differ only in the exchange between experts and in the place of
    optimizer states, the plain group first.  `longest`: numbers of layouts by the layers of their
    longest chunk; `makers`: each makes a group."""

    longest: Counter[int]
    makers: Sequence[Callable[[], BoundedGroup]]


class OpenLayout(Struct):
    """A layout during the search: its group and its index there.  `fits`: by candidate, the lowest
    step of the share that fits in the fewest pieces; `holds`: whether the smallest plan may fit
    (None: unknown); `tightened`: whether any candidate has a bound by the schedule; `judged`:
    candidates and pieces that have been judged; `simulated`: the contents of simulated plans;
    `short`: live bytes that a candidate lacked at a step; `flat`: candidates and steps that more
    pieces do not help; `ends`: by candidate, the lowest step that host memory cannot hold;
    `refused`: candidates without a plan at any step and in any pieces; `counted`: whether the
    layout has a plan faster than `faster_than_s`."""

    group: BoundedGroup
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
    def choice(self) -> LayoutChoice:
        """The layout and its layers."""
        return self.group.choices[self.index]

    def entry(
        self, stage: Stage, candidate: Candidate, step: int = 1, pieces: int = 1
    ) -> "QueueEntry":
        """An entry of the queue for this layout."""
        return QueueEntry(stage, self, None, candidate, step, pieces)

    @property
    def trials(self) -> LayoutTrials:
        """The trials of the layout."""
        return self.group.trials_at(self.index)

    def extends_fitting(self, candidate: Candidate, step: int) -> bool:
        """Whether a candidate at a step of its share adds methods, none of which moves passes, to a
        plan that fits, at the same or a larger share.  It is then not faster than that plan."""
        return any(
            known.parts == candidate.parts[: len(known.parts)]
            and known.moves == candidate.moves
            and step >= least
            and not (known == candidate and candidate.share)
            for known, least in self.fits.items()
        )

    def is_flat(self, candidate: Candidate, step: int, short_bytes: float) -> bool:
        """Whether more pieces (or pieces at all) freed no live bytes at a step.  A peak of live
        bytes is a maximum of lines in 1 / pieces, so once constant it stays constant.  This does
        not hold for reserved bytes."""
        fewer = (candidate, candidate.in_one_piece)
        return short_bytes in [self.short.get((item, step)) for item in fewer]


class QueueEntry(Struct, frozen=True):
    """An entry of the queue: the next work, and a candidate at a step of its share and of its
    pieces.  `group`: the layout group, if the entry is not for a single layout; `alike`: the groups
    of an entry that no group is made for yet."""

    stage: Stage
    layout: OpenLayout | None
    group: BoundedGroup | None
    candidate: Candidate
    step: int = 1
    pieces: int = 1
    alike: Alike | None = None


class Unprobed(NamedTuple):
    """A candidate that was excluded at a layout without a probe, with a lower bound of the bytes
    that it lacks, and whether these are host bytes."""

    nbytes: float
    host: bool
    layout: OpenLayout
    candidate: Candidate


T = TypeVar("T")


class Queue(Generic[T]):
    """Entries in the order of their bounds, those with equal bounds in the order of arrival.
    *Ripe* entries are also in a second heap, which has only ripe entries."""

    def __init__(self) -> None:
        self._all: list[tuple[float, int, T]] = []
        self._ripe: list[tuple[float, int, T]] = []
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

    def _drop(self, heap: list[tuple[float, int, T]]) -> None:
        """Remove entries from the front of a heap that were taken through the other heap."""
        while heap and heap[0][1] not in self._waiting:
            heapq.heappop(heap)


LATER = 1e6
"""The penalty in the order of work that must wait for all leaner work."""


class LeanOrder:
    """The order of a search for any plan that fits: the leanest layouts and plans come first.
    `searched`: layouts whose candidates are judged; `waiting`: numbers of queued entries by layout;
    `doubts`: by layout, candidates that were dropped for another reason than a proved lack of
    bytes, which may not hold for a larger micro-batch."""

    def __init__(self, leanest: Iterable[Candidate]) -> None:
        self.searched: set[LayoutChoice] = set()
        self.waiting: Counter[LayoutChoice] = Counter()
        self.doubts: dict[LayoutChoice, list[Candidate]] = defaultdict(list)
        self._lean = {KEEP, *leanest}

    def of(self, entry: QueueEntry) -> float:
        """The position of an entry: lean layouts first, on all layouts the leanest candidates
        first, and layouts for which a leaner layout exists last."""
        if entry.layout is None:
            assert entry.group is not None
            shares = entry.group.lean_shares[entry.group.states_over_bytes <= 0]
            return float(shares.min()) + 2 * LATER * (entry.step - 1)
        order = float(entry.layout.group.lean_shares[entry.layout.index])
        less = leaner(entry.layout.choice)
        order += 0.0 if entry.candidate in self._lean else LATER
        return order + (0.0 if less is None else 2 * LATER)


def leaner(choice: LayoutChoice) -> LayoutChoice | None:
    """The same layout with micro-batch 1 if that needs no more bytes under any plan, because both
    have equally many passes in flight and accumulate gradients; otherwise None."""
    lay = choice.layout
    if lay.micro_batch == 1 or lay.num_micro_batches <= lay.pp:
        return None
    return replace(choice, layout=replace(lay, micro_batch=1))


SHOWN = 1.1
"""Until `list_all`, work whose bound is at least this multiple of the best step is not queued."""


class SearchQueue:
    """The queue of a search, in the order of bounds of seconds or in a `lean` order.  It rejects
    work whose bound is too far above `best_s`, the best step so far; with `lists` it sets such work
    aside for `list_all`.  With `faster_than_s` it accepts all work below that step."""

    def __init__(
        self, *, faster_than_s: float = inf, lists: bool = False, lean: LeanOrder | None = None
    ) -> None:
        self.entries: Queue[QueueEntry] = Queue()
        self.best_s, self.faster_than_s, self.lean = inf, faster_than_s, lean
        self.lists, self.listing = lists, False
        self._dropped: Counter[str] = Counter()
        self._aside: list[tuple[float, QueueEntry]] = []

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def bound_s(self) -> float:
        """Lower bound, in seconds, of the step of any plan in the queue; 0 in a lean order as long
        as the queue is not empty."""
        if self.lean:
            return 0.0 if self.entries else inf
        return self.entries.bound

    def push(self, bound_s: float, entry: QueueEntry) -> None:
        """Queue an entry, unless its bound is too high."""
        ripe = entry.stage in RIPE
        if self.lean:
            self.entries.push(-1.0 if ripe else self.lean.of(entry), entry, ripe=ripe)
            if entry.layout:
                self.lean.waiting[entry.layout.choice] += 1
            return
        counting = self.faster_than_s < inf
        most = self.faster_than_s if counting else SHOWN * self.best_s
        if counting and entry.stage == "grow" and bound_s < most:
            bound_s = nextafter(most, 0.0)  # growing comes last, because it rarely helps
        if bound_s < most or self.listing:
            self.entries.push(bound_s, entry, ripe=ripe)
        else:
            _count(self._dropped, entry)
            self.postpone(bound_s, entry)

    def postpone(self, bound_s: float, entry: QueueEntry) -> None:
        """Set aside work on plans that cannot be the fastest, until `list_all` queues it."""
        if self.listing:
            self.push(bound_s, entry)
        elif self.lists:
            self._aside.append((bound_s, entry))

    def list_all(self) -> None:
        """Queue the postponed work, and accept such work from now on."""
        self.listing = True
        self._dropped.clear()
        for bound_s, entry in self._aside:
            self.push(bound_s, entry)
        self._aside.clear()

    @property
    def slower(self) -> Counter[str]:
        """Numbers of layouts and plans whose bounds are not below the best step, by cause."""
        result = self._dropped.copy()
        for bound_s, entry in self.entries.waiting():
            if bound_s >= self.best_s:
                _count(result, entry)
        return result


def _count(slower: Counter[str], entry: QueueEntry) -> None:
    """Count the layouts or plans of an entry of the queue by what makes them slow."""
    if entry.layout is None or entry.stage == "layout":
        held = entry.alike.longest.total() if entry.alike else 1
        held = int((entry.group.states_over_bytes <= 0).sum()) if entry.group else held
        slower["layouts slower than the best even if nothing is recomputed or offloaded"] += held
    else:
        slower["slower than the best: kernels, messages and copies"] += 1


COPIED, KEPT = (
    "host memory too small for the bytes that are copied",
    "device memory too small for the bytes that are kept",
)
"""The reasons for which a candidate is excluded without a probe."""
STATES = "layouts where parameters, gradients and optimizer states do not fit"
EXTENDS_FITTING = "adds a method to a plan that already fits"
"""The reason for a candidate that cannot be faster than a plan that fits."""


class Exclusions:
    """What a search has excluded.  `counts`: numbers of plans and layouts by reason.
    `device_short_bytes`, `host_short_bytes`: the fewest device bytes, and host bytes per node, that
    an excluded plan lacked; `states_short_bytes`: those that any layout's states lacked.
    `refusal`: the last reason why a method has no plan."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.device_short_bytes = self.host_short_bytes = self.states_short_bytes = inf
        self.refusal = ""
        self._ended: list[tuple[float, LayoutTrials, bytes]] = []  # the bytes are a lower bound

    def note(self, trial: Trial, trials: LayoutTrials) -> None:
        """Note what a plan of a layout lacks, or why the layout has no plan."""
        if trial.at_least:
            self._ended.append((trial.short_bytes, trials, trial.content))
        else:
            self.lacks_device(trial.short_bytes)
        if trial.result.reason.startswith(NO_PLAN):
            self.refusal = trial.result.reason.removeprefix(NO_PLAN)
        if trial.host_short_bytes > 0:
            self.lacks_host(trial.host_short_bytes)

    def replay_whole(self) -> None:
        """Replay in full the plans whose replay was stopped early, if they may lack fewer bytes
        than every plan so far."""
        for short_bytes, trials, content in sorted(self._ended, key=itemgetter(0)):
            if short_bytes < self.device_short_bytes:
                self.lacks_device(trials.lacked_bytes(content))
        self._ended.clear()

    def with_room(self, over: Array) -> NDArray[np.bool_]:
        """Which layouts of a group have room for the states, which exceed it by `over` bytes; note
        the others."""
        held: NDArray[np.bool_] = over <= 0
        self.counts[STATES] += int((~held).sum())
        if not held.any():
            self.states_short_bytes = min(self.states_short_bytes, float(over.min()))
        return held

    def lacks_device(self, nbytes: float) -> None:
        """Note the device bytes that a plan lacks."""
        self.device_short_bytes = min(self.device_short_bytes, nbytes)

    def lacks_host(self, nbytes: float) -> None:
        """Note the host bytes of a node that a plan lacks."""
        self.host_short_bytes = min(self.host_short_bytes, nbytes)
