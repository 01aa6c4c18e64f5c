"""Best-first search: tightens bounds and simulates plans in the order of their bounds."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import inf

from msgspec.structs import replace

from rematbench.advise.search.candidates import KEEP, Candidate, Tree
from rematbench.advise.search.closed_bounds import Bounds
from rematbench.advise.search.memory_rules import MemoryRules
from rematbench.advise.search.queue import (
    RIPE,
    Item,
    LeanOrder,
    Place,
    SearchQueue,
    Stage,
    leaner,
)
from rematbench.advise.search.shard_bounds import ShardBounds
from rematbench.advise.search.trials import Trial
from rematbench.plugins.registry import Registry
from rematbench.worlds.packages.flags import Engines

EXTENDS_FITTING = "adds a method to a plan that already fits"
"""Why a candidate falls that adds methods to a plan that fits: it is not faster."""


AHEAD = 4
"""One in this many entries is the ripe entry with the lowest bound, so that a step that fits exists
early: only an entry whose bound is below (1 - within) x the best step, which the proof needs."""


TIGHTENED, SIMULATED = 20, 30
"""Work of a bound by the schedule and of a simulation, in layers that a probe lowers as fast."""


class Search:
    """A running search over the layouts of shards.  `work`: work so far, counted in layers that
    probes lower.  Layouts with fewer than `min_pp` pipeline ranks are left out.  With a queue in
    lean order, the search looks for any plan that fits.  It then ends with the first such plan or
    an empty queue, starts with the leanest layouts and plans, bounds no seconds, and skips plans
    that need at least as many bytes as plans that did not fit."""

    def __init__(
        self,
        shards: Sequence[ShardBounds],
        tree: Tree,
        registry: Registry,
        *,
        engine: str = "",
        within: float = 0.0,
        min_pp: int = 1,
        queue: SearchQueue | None = None,
    ) -> None:
        self.shards, self.tree, self.registry = shards, tree, registry
        self.engine, self.within, self.min_pp = engine, within, min_pp
        self.queue = SearchQueue() if queue is None else queue
        self.memory = MemoryRules(tree, registry, self.queue)
        self.excluded = self.memory.excluded
        self.work = 0
        self._states_short_bytes = inf
        for bounds in shards:
            over = bounds.shard.states_over_bytes
            held = over <= 0
            self.excluded.counts[
                "layouts where parameters, gradients and optimizer states do not fit"
            ] += int((~held).sum())
            if held.any():
                least_s = float(bounds.shard.kernels_s[held].min())
                self.queue.push(least_s, Item("shard", None, bounds, KEEP))
            else:
                self._states_short_bytes = min(self._states_short_bytes, float(over.min()))

    @cached_property
    def plans(self) -> int:
        """The number of joint plans: every plan of the tree at every layout, including layouts
        whose states do not fit."""
        longest = Counter(max(one.sizes) for bounds in self.shards for one in bounds.shard.choices)
        return sum(self.tree.plans(layers) * n for layers, n in longest.items())

    @property
    def bound_s(self) -> float:
        """Lower bound, in seconds, of the step of any plan in the queue."""
        return self.queue.bound_s

    @property
    def best_s(self) -> float:
        """Seconds of the fastest step that fits so far; infinite before the first."""
        return self.queue.best_s

    @property
    def short_bytes(self) -> float:
        """The fewest device bytes that an excluded plan, or the states of a layout, lacked."""
        self.memory.replay_whole()
        return min(self.excluded.device_short_bytes, self._states_short_bytes)

    @property
    def gap(self) -> float:
        """Upper bound of the seconds that a better plan may save, as a share of the best step."""
        if self.best_s == inf:
            return inf if self.queue else 0.0
        return max(0.0, 1.0 - self.bound_s / self.best_s)

    @property
    def ended(self) -> bool:
        """Whether a search for any plan that fits is over although plans are left."""
        return self.queue.lean is not None and self.best_s < inf

    def run(self) -> Iterator[Trial | None]:
        """Work until the queue is empty.  After each entry, yield the trial of the plan that the
        entry simulated, or None."""
        turn, entries, lean = 0, self.queue.entries, self.queue.lean
        while entries:
            ahead = turn % AHEAD == 0 and entries.ripe_bound < (1 - self.within) * self.best_s
            bound_s, item = entries.pop(ripe=ahead)
            bounds = item.place.bounds if item.place else item.bounds
            assert bounds is not None
            prober, own = bounds.shard.prober, item.stage != "layout"
            before = prober.layers
            trial = self._take(0.0 if lean else bound_s, item)
            if lean and item.place:
                lean.waiting[item.place.choice] -= 1
            none = not lean and self.best_s == self.queue.faster_than_s == inf
            if not entries and none:  # nothing fits: by how much is asked
                self.memory.replay_whole()
                self.memory.measure_shortage()
            turn += own  # of entries that are more than a comparison of bounds
            self.work += own + prober.layers - before
            yield trial

    def note_step(self, step_s: float) -> None:
        """Note the step time, in seconds, of a plan that fits from another process or an earlier
        search."""
        self.queue.best_s = min(self.queue.best_s, step_s)

    def list_all(self) -> None:
        """From now on, also take plans that cannot be faster than a known plan: plans that add a
        method to a plan that already fits, and plans that are much slower than the best."""
        self.excluded.counts.pop(EXTENDS_FITTING, None)
        self.queue.list_all()

    def _take(self, bound_s: float, item: Item) -> Trial | None:
        place = item.place
        if place is None:
            self._open(bound_s, item)
        elif place.counted:
            self.excluded.counts["layout already has a plan that is fast enough"] += 1
        elif self._dominated(place, item.candidate, item.step if item.stage in RIPE else 1):
            self.excluded.counts[EXTENDS_FITTING] += 1
            self.queue.postpone(bound_s, item)
        elif item.stage in RIPE and self.memory.settled(bound_s, place, item):
            self.excluded.counts["memory too small or no plan, known from an earlier plan"] += 1
        elif item.stage in ("tighten", "grow") or (item.stage == "expand" and not place.tightened):
            self._tighten(bound_s, place, item)
        elif item.stage == "expand":
            self._expand(bound_s, place, item.candidate)
        elif item.stage == "compose":
            self.memory.judge(bound_s, place, item.candidate)
        elif item.stage == "layout":
            self._judge_roots(bound_s, place)
        elif item.stage == "pieces":
            self.memory.judge(bound_s, place, item.candidate, item.pieces)
        else:
            return self._simulate(bound_s, place, item)
        return None

    def _open(self, bound_s: float, item: Item) -> None:
        """Queue the layouts of a shard whose states fit.  No plan is faster than the plan there
        that keeps everything."""
        bounds = item.bounds
        assert bounds is not None
        shard = bounds.shard
        room = [int(index) for index in (shard.states_over_bytes <= 0).nonzero()[0]]
        if self.queue.lean:
            self._open_leanest(item, self.queue.lean, [Place(bounds, at, {}) for at in room])
            return
        keep = bounds.of(KEEP)
        for at in room:
            if shard.choices[at].layout.pp >= self.min_pp:
                least_s = float(keep.step_s[0, at]) if isinstance(keep, Bounds) else 0.0
                begun = Item("layout", Place(bounds, at, {}), None, KEEP)
                self.queue.push(max(bound_s, least_s), begun)

    def _open_leanest(self, item: Item, lean: LeanOrder, places: Sequence[Place]) -> None:
        """Judge all candidates at the layouts of a shard that none is leaner than; at the second
        step the others, with the doubtful candidates of the leaner layout where that has been
        searched."""
        late = item.step > 1
        for place in places:
            choice, candidates = place.choice, self.tree.roots
            less = leaner(choice)
            if late == (less is None):
                continue
            if less in lean.searched and not lean.waiting[less]:
                self.excluded.counts["needs as much memory as with micro-batch 1"] += 1
                candidates = tuple(dict.fromkeys(lean.doubts[less]))
            lean.searched.add(choice)
            for candidate in candidates:
                self.memory.judge(0.0, place, candidate)
        assert item.bounds is not None
        if not late and any(map(leaner, item.bounds.shard.choices)):
            self.queue.push(0.0, Item("shard", None, item.bounds, KEEP, 2))

    def _judge_roots(self, bound_s: float, place: Place) -> None:
        for root in self.tree.roots:
            self.memory.judge(bound_s, place, root)

    def _dominated(self, place: Place, candidate: Candidate, step: int = 1) -> bool:
        """Whether a candidate at a step of its share is made of a plan that fits by further
        methods, at no smaller a share, so that it is not faster.  It may be faster than its other
        methods alone, as what one rebuilds the next need not copy; and with one more method a
        smaller share may do."""
        return not self.queue.listing and any(
            known.parts == candidate.parts[: len(known.parts)]
            and step >= least
            and not (known == candidate and candidate.share)
            for known, least in place.fits.items()
        )

    def _expand(self, bound_s: float, place: Place, candidate: Candidate) -> None:
        """Queue the candidates with one more method than `candidate`, if the smallest plan may fit;
        in a search for any fit the leanest candidate of each family before them."""
        if not self.memory.may_fit(place):
            return
        if self.queue.lean and candidate == KEEP:
            for leanest in self.tree.leanest:
                self.queue.push(0.0, Item("compose", place, None, leanest))
        for more in self.tree.more(candidate):
            found = Item("compose", place, None, more)
            if self._dominated(place, more):
                self.queue.postpone(bound_s, found)
            else:
                self.queue.push(bound_s, found)

    def _tighten(self, bound_s: float, place: Place, item: Item) -> None:
        """Queue a candidate with its bound by the schedule.  The bound of a candidate to expand
        holds too: no candidate composed of it is faster.  A search for any fit goes on without that
        bound."""
        expands = item.stage != "tighten"
        if self.queue.lean:
            if expands:
                self._expand(bound_s, place, item.candidate)
                return
        else:
            self.work += TIGHTENED
            place.tightened = True
            tight_s = place.bounds.tight_s(item.candidate, item.step, item.pieces, place.index)
            bound_s = max(bound_s, tight_s)
        stage: Stage = "expand" if expands else "simulate"
        self.queue.push(bound_s, Item(stage, place, None, item.candidate, item.step, item.pieces))

    def _simulate(self, bound_s: float, place: Place, item: Item) -> Trial | None:
        """Simulate a plan; if it does not fit, queue the next step of its scalars or its expansion.
        None where the same plan was simulated under another name."""
        self.work += SIMULATED
        candidate, site = item.candidate, place.site
        method = candidate.text(item.step, item.pieces)
        if self.engine and place.engines is None:
            place.engines = Engines(site.problem, self.engine)
        trial = site.trial(method, self.registry, bound_s=bound_s, engines=place.engines)
        again = not trial.content or trial.content in place.simulated
        place.simulated.add(trial.content)
        step_s = trial.result.fitting_s
        if not trial.result.fits:
            self.excluded.counts[trial.result.reason.split(":")[0]] += 1
            self.memory.after_failure(bound_s, place, item, trial)
        else:
            if item.pieces == 1:
                place.fits[candidate] = min(item.step, place.fits.get(candidate, item.step))
            if candidate.share:
                self.memory.queue_next_step(bound_s, place, item)
            elif not self.tree.ends(candidate):  # a candidate with a share grows when it is judged
                self.queue.postpone(step_s, Item("expand", place, None, candidate))
            self.note_step(step_s)
            place.counted = step_s < self.queue.faster_than_s < inf
        return None if again else replace(trial, candidate=site.named(candidate.text(1)))
