"""Best-first search: tightens bounds and simulates plans in the order of their bounds."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import inf, nextafter

from msgspec.structs import replace

from rematbench.advise.search.arms import KEEP, Arm
from rematbench.advise.search.bounds import Bounds
from rematbench.advise.search.follow import Follow
from rematbench.advise.search.place import BEGINNING, RIPE, Item, Place, Stage
from rematbench.advise.search.queue import Queue
from rematbench.advise.search.shard import Shard
from rematbench.advise.search.tree import Tree
from rematbench.advise.search.trial import Tried, tried_plan
from rematbench.plugins.registry import Registry
from rematbench.worlds.packages.flags import Engines

SHOWN = 1.1
"""Before a listing, work whose bound is at least this multiple of the best step is not queued."""

MADE = "made of a plan that fits"
"""Why an arm falls that adds methods to a plan that fits: it is not faster."""

AHEAD = 4
"""One in this many entries is the ripe entry of the least bound, so that a step that fits is known
early: only an entry whose bound is below (1 - within) x the best step, which the proof needs."""

TIGHTENED, SIMULATED = 20, 30
"""Work of a bound by the schedule and of a simulation, in layers that a probe lowers as fast."""


class Search(Follow):
    """One search under way.  `work`: work so far, in layers that probes lower.  Layouts with fewer
    than `least_pp` pipeline ranks are left out.  A search that `lists` keeps what cannot be faster
    than a known plan, for `list_all`."""

    def __init__(
        self,
        shards: Sequence[Shard],
        tree: Tree,
        registry: Registry,
        *,
        engine: str = "",
        within: float = 0.0,
        faster_than_s: float = inf,
        least_pp: int = 1,
        lists: bool = False,
    ) -> None:
        super().__init__(tree, registry)
        self.shards, self.engine, self.within = shards, engine, within
        self.faster_than_s, self.least_pp = faster_than_s, least_pp
        self.queue: Queue[Item] = Queue()
        self.work = 0
        self.best_s = self._states_short_bytes = inf
        self._dropped: Counter[str] = Counter()
        self.lists, self.listing = lists, False
        self._aside: list[tuple[float, Item]] = []
        for shard in shards:
            over = shard.states_over_bytes
            held = over <= 0
            self.fell["layouts whose states alone do not fit"] += int((~held).sum())
            if held.any():
                self._push(float(shard.kernels_s[held].min()), Item("shard", None, shard, KEEP))
            else:
                short = float(over.min())
                self._states_short_bytes = min(self._states_short_bytes, short)

    @cached_property
    def plans(self) -> int:
        """The number of joint plans: every layout (also those whose states do not fit) with every
        plan of the tree there."""
        longest = Counter(max(one.sizes) for shard in self.shards for one in shard.choices)
        return sum(self.tree.plans(layers) * n for layers, n in longest.items())

    @property
    def bound_s(self) -> float:
        """Seconds: no plan in the queue has a shorter step."""
        return self.queue.bound

    @property
    def short_bytes(self) -> float:
        """The least device bytes that an excluded plan, or the states of a layout, lacked."""
        self._replay_whole()
        return min(self.plans_short_bytes, self._states_short_bytes)

    @property
    def gap(self) -> float:
        """How much shorter the step of an unknown plan may be, as a share of the best step."""
        if self.best_s == inf:
            return inf if self.queue else 0.0
        return max(0.0, 1.0 - self.bound_s / self.best_s)

    @property
    def ended(self) -> bool:
        """Whether the search is over although plans are left."""
        return False

    def run(self) -> Iterator[Tried | None]:
        """Work until the queue is empty.  Yields after each entry: the plan that the entry
        simulated, or None."""
        turn = 0  # of entries that are more than a comparison of bounds
        while self.queue:
            ahead = turn % AHEAD == 0 and self.queue.ripe_bound < (1 - self.within) * self.best_s
            bound_s, item = self.queue.pop(ripe=ahead)
            shard = item.place.shard if item.place else item.shard
            assert shard is not None
            own, before = item.stage not in BEGINNING, shard.layers
            found = self._take(bound_s, item)
            if not self.queue and self.best_s == self.faster_than_s == inf:  # nothing fits
                self._replay_whole()
                self._measure_shortage()
            turn += own
            self.work += own + shard.layers - before
            yield found

    def beat(self, step_s: float) -> None:
        """Take note of the seconds of a step that fits, found by another process or before."""
        self.best_s = min(self.best_s, step_s)

    def _push(self, bound_s: float, item: Item) -> None:
        counting = self.faster_than_s < inf
        most = self.faster_than_s if counting else SHOWN * self.best_s
        if counting and item.stage == "grow" and bound_s < most:
            bound_s = nextafter(most, 0.0)  # last: few layouts are faster by that alone
        if bound_s < most or self.listing:
            self.queue.push(bound_s, item, ripe=item.stage in RIPE)
        else:
            _count(self._dropped, item)
            self._put_aside(bound_s, item)

    def _put_aside(self, bound_s: float, item: Item) -> None:
        """Keep work on plans that cannot be the fastest for the listing, which queues it."""
        if self.listing:
            self._push(bound_s, item)
        elif self.lists:
            self._aside.append((bound_s, item))

    def list_all(self) -> None:
        """From now on take the plans too that cannot be faster than a known one: those that add a
        method to a plan that fits, and those that are much slower than the best."""
        self.listing = True
        self._dropped.clear()
        self.fell.pop(MADE, None)
        for bound_s, item in self._aside:
            self._push(bound_s, item)
        self._aside.clear()

    @property
    def slower(self) -> Counter[str]:
        """Counts of the layouts and plans that are no faster than the best step by their bounds, by
        what makes them slow."""
        found = self._dropped.copy()
        for bound_s, item in self.queue.waiting():
            if bound_s >= self.best_s:
                _count(found, item)
        return found

    def _take(self, bound_s: float, item: Item) -> Tried | None:
        place = item.place
        if place is None:
            assert item.shard is not None
            self._open(bound_s, item.shard)
        elif place.counted:
            self.fell["of a layout that is fast enough"] += 1
        elif self._dominated(place, item.arm, item.step if item.stage in RIPE else 1):
            self.fell[MADE] += 1
            self._put_aside(bound_s, item)
        elif item.stage in RIPE and self._settled(bound_s, place, item):
            self.fell["memory or no plan, as before"] += 1
        elif item.stage in ("closed", "grow") or (item.stage == "expand" and not place.tightened):
            self._tighten(bound_s, place, item)
        elif item.stage == "expand":
            self._expand(bound_s, place, item.arm)
        elif item.stage == "made":
            self._made(bound_s, place, item.arm)
        elif item.stage in BEGINNING:
            self._begin(bound_s, place, item)
        elif item.stage == "pieces":
            self._judge(bound_s, place, item.arm, item.pieces)
        else:
            return self._simulate(bound_s, place, item)
        return None

    def _open(self, bound_s: float, shard: Shard) -> None:
        """Queue the layouts of a shard whose states fit.  No plan is faster than the plan there
        that keeps everything."""
        keep = shard.bounds(KEEP)
        for index in (shard.states_over_bytes <= 0).nonzero()[0]:
            at = int(index)
            if shard.choices[at].layout.pp >= self.least_pp:
                least_s = float(keep.step_s[0, at]) if isinstance(keep, Bounds) else 0.0
                found = Item("layout", Place(shard, at, {}), None, KEEP)
                self._push(max(bound_s, least_s), found)

    def _begin(self, bound_s: float, place: Place, item: Item) -> None:
        """Begin with the roots of the tree at a layout, or go on with one of them."""
        if item.stage == "root":
            self._root(bound_s, place, item.arm, item.step)
            return
        for root in self.tree.roots:
            self._root(bound_s, place, root)

    def _root(self, bound_s: float, place: Place, arm: Arm, known: int = 0) -> None:
        """Bound an arm of several methods by the methods before its last, whose probes are cheaper:
        first by one, then by two, as long as the bound is the least of all; then judge it.  A plan
        is no faster than the plan that its last method was added to.  An arm that does not fit by
        what it keeps and copies needs no bound.  `known`: the methods that have bounds."""
        if known + 1 >= len(arm.parts):
            self._judge(bound_s, place, arm)
            return
        if not known and self.tree.ends(arm) and self._falls(place, arm):
            return
        found = place.shard.bounds(Arm(arm.parts[: known + 1]))
        if isinstance(found, Bounds):
            bound_s = max(bound_s, float(found.step_s[0, place.index]))
        self._push(bound_s, Item("root", place, None, arm, known + 1))

    def _dominated(self, place: Place, arm: Arm, step: int = 1) -> bool:
        """Whether an arm at a step of its line is made of a plan that fits by further methods, at
        no smaller a share, so that it is not faster.  It may be faster than its other methods
        alone, as what one rebuilds the next need not copy; and with one more method a smaller share
        may do."""
        return not self.listing and any(
            known.parts == arm.parts[: len(known.parts)]
            and step >= least
            and not (known == arm and arm.line)
            for known, least in place.fits.items()
        )

    def _expand(self, bound_s: float, place: Place, arm: Arm) -> None:
        """Queue the arms with one more method than `arm`, if the lean arm of any family may fit."""
        if not any(self._may_fit(place, *family) for family in self.tree.families):
            self.fell["device memory, under the leanest plans"] += 1
            return
        for more in self.tree.more(arm):
            found = Item("made", place, None, more)
            if self._dominated(place, more):
                self._put_aside(bound_s, found)
            else:
                self._push(bound_s, found)

    def _made(self, bound_s: float, place: Place, arm: Arm) -> None:
        """Judge an arm if the lean arm of its family may fit; else expand the arm if a family that
        contains the lean arm's methods may fit."""
        lean, pieces = self.tree.family(arm)
        if self._may_fit(place, lean, pieces):
            self._judge(bound_s, place, arm)
        elif any(
            set(lean.parts) <= set(more.parts)
            and (cut or not pieces)
            and self._may_fit(place, more, cut)
            for more, cut in self.tree.families
        ):
            self._expand(bound_s, place, arm)

    def _tighten(self, bound_s: float, place: Place, item: Item) -> None:
        """Queue an arm with its bound by the schedule.  The bound of an arm to expand holds too: no
        arm composed of it is faster."""
        self.work += TIGHTENED
        place.tightened = True
        tight = place.shard.tight_s(item.arm, item.step, item.pieces, place.index)
        stage: Stage = "tight" if item.stage == "closed" else "expand"
        found = Item(stage, place, None, item.arm, item.step, item.pieces)
        self._push(max(bound_s, tight), found)

    def _simulate(self, bound_s: float, place: Place, item: Item) -> Tried | None:
        """Simulate a plan; if it does not fit, queue the next step of its scalars or its expansion.
        None where the same plan was simulated under another name."""
        self.work += SIMULATED
        arm, site = item.arm, place.site
        method = arm.text(item.step, item.pieces)
        if self.engine and place.engines is None:
            place.engines = Engines(site.problem, self.engine)
        tried = tried_plan(
            site.choice, site.problem, method, bound_s, self.registry, place.engines, site.trials
        )
        again = not tried.content or tried.content in place.known
        place.known.add(tried.content)
        if tried.evaluation is None:
            self.fell[tried.reason.split(":")[0]] += 1
            self._go_on(bound_s, place, item, tried)
        else:
            if item.pieces == 1:
                place.fits[arm] = min(item.step, place.fits.get(arm, item.step))
            if arm.line:
                self._go_along(bound_s, place, item)
            elif not self.tree.ends(arm):  # an arm with a line grows when it is judged
                self._put_aside(tried.step_s, Item("expand", place, None, arm))
            self.beat(tried.step_s)
            place.counted = tried.step_s < self.faster_than_s < inf
        return None if again else replace(tried, arm=arm.text(1))


def _count(slower: Counter[str], item: Item) -> None:
    """Count the layouts or plans of an entry of the queue by what makes them slow."""
    place = item.place
    if place is None or item.stage == "layout":
        held = int((item.shard.states_over_bytes <= 0).sum()) if item.shard else 1
        slower["layouts slower even where everything is kept"] += held
    elif place.shard.by_copies(item.arm, item.step, item.pieces, place.index):
        slower["slower by their bound: copies over the host link"] += 1
    else:
        slower["slower by their bound: kernels and messages"] += 1
