"""Best-first search, which tightens bounds and simulates plans in the order of their bounds.

Lower bounds of bytes decide which plans of a candidate may fit a layout, and a simulated plan that
does not fit may exclude further plans of its candidate.
"""

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np
from msgspec.structs import replace

from rematbench.advise.bounds.columns import Bounds
from rematbench.advise.bounds.lines import Refused
from rematbench.advise.candidates.candidate import KEEP, Candidate
from rematbench.advise.candidates.trials import NO_PLAN, RESERVED, Trial, planned_at
from rematbench.advise.search.families import PlanFamily
from rematbench.advise.search.queue import (
    COPIED,
    EXTENDS_FITTING,
    KEPT,
    RIPE,
    Alike,
    BoundedGroup,
    Exclusions,
    LeanOrder,
    OpenLayout,
    QueueEntry,
    SearchQueue,
    Stage,
    Unprobed,
    leaner,
)
from rematbench.plugins.registry import Registry
from rematbench.worlds.packages.flags import Engines


class MemoryRules:
    """The rules that queue a candidate if its bytes may fit, and otherwise count it as excluded.
    `excluded`: the plans and layouts that the search has excluded."""

    def __init__(self, family: PlanFamily, registry: Registry, queue: SearchQueue) -> None:
        self.family, self.registry, self.queue = family, registry, queue
        self.excluded = Exclusions()
        self._unprobed: list[Unprobed] = []

    def judge(
        self, bound_s: float, layout: OpenLayout, candidate: Candidate, pieces: int = 1
    ) -> None:
        """Queue a candidate at a layout, at the lowest step of its share whose bytes may fit.  If
        no step may fit, queue the candidate's expansion; with a share, queue the expansion in any
        case, because a smaller share may suffice with one more method.  Each number of pieces is
        judged only once, although both the judgement and a failed plan of fewer pieces request it.
        More pieces are not tried if host memory is short, because pieces do not change host
        bytes."""
        if (candidate, pieces) in layout.judged:
            return
        layout.judged.add((candidate, pieces))
        if candidate.pieces and layout.ends.get(candidate.in_one_piece) == 1:
            self.excluded.counts["host memory too small for any number of pieces"] += 1
            return
        if pieces == 1 and self.family.ends_next(candidate) and self.lacks_bytes(layout, candidate):
            for more in self.family.more(candidate):
                self.queue.push(bound_s, layout.entry("compose", more))
            return
        if self.queue.lean and self._refused_in_any_pieces(layout, candidate, pieces):
            return
        result = self.queue_step(layout, candidate, pieces, bound_s)
        if candidate.pieces is None:
            grows = (candidate.share or not result) and not self.family.ends(candidate)
            known = layout.group.of(candidate) if grows else None
            if isinstance(known, Bounds):
                bound = max(bound_s, float(known.step_s[0, layout.index]))
                stage: Stage = "grow" if candidate.share else "expand"
                self.queue.push(bound, layout.entry(stage, candidate))
            return
        if pieces < candidate.most_pieces and (not result or result > 1):
            self._ask_pieces(layout, candidate, pieces, bound_s, result or inf)

    def _refused_in_any_pieces(self, layout: OpenLayout, candidate: Candidate, pieces: int) -> bool:
        """Whether a search for any fit can drop a candidate at once, because its probe has no plan
        in the fewest and the most pieces for the same reason."""
        assert self.queue.lean is not None
        result = layout.group.probe(candidate, pieces)
        if not isinstance(result, Refused):
            return False
        self.queue.lean.doubts[layout.choice].append(candidate)
        if result != layout.group.probe(candidate, candidate.most_pieces):
            return False
        self._no_plan(result)
        return True

    def _no_plan(self, refused: Refused) -> None:
        self.excluded.counts["no plan"] += 1
        self.excluded.refusal = refused.reason

    def lacks_bytes(self, layout: OpenLayout, candidate: Candidate) -> bool:
        """Whether a candidate keeps or copies too many bytes to fit. Such a candidate is probed
        only if nothing fits and its shortage may be the smallest."""
        short = layout.group.short(candidate)
        if short is None or (lacks := short.falls[layout.index]) is None:
            return False
        nbytes, host = lacks
        self.excluded.counts[COPIED if host else KEPT] += 1
        self._unprobed.append(Unprobed(nbytes, host, layout, candidate))
        return True

    def measure_shortage(self) -> None:
        """Probe the candidates that were excluded without a probe, if they may lack fewer bytes
        than every plan so far."""
        excluded = self.excluded
        for unprobed in sorted(self._unprobed, key=lambda item: (item.host, item.nbytes)):
            if unprobed.host and excluded.device_short_bytes < inf:
                break  # candidates that lack host memory come last
            lacks = excluded.host_short_bytes if unprobed.host else excluded.device_short_bytes
            if unprobed.nbytes < lacks:
                self._first_step(unprobed.layout, unprobed.candidate, 1, 0.0)
        self._unprobed.clear()

    def _ask_pieces(
        self, layout: OpenLayout, candidate: Candidate, pieces: int, bound_s: float, below: float
    ) -> None:
        """Queue a candidate in the fewest pieces, more than `pieces`, in which its bytes may fit at
        a step below `below`.  Pieces change neither kept bytes nor host bytes."""
        group, at = layout.group, layout.index
        known = group.of(candidate, pieces)
        if isinstance(known, Refused):
            self.queue.push(bound_s, layout.entry("pieces", candidate, 1, pieces + 1))
            return
        fewer = max(
            (had for item, had in layout.judged if item == candidate and had < pieces), default=0
        )
        over = known.host_bytes[:, at] > group.problem.cost.host_room_bytes
        for more in range(pieces + 1, candidate.most_pieces + 1):
            high = over
            if fewer:
                peak_bytes = group.in_more_pieces(candidate, fewer, pieces, more)[:, at]
                high = over | (peak_bytes > group.usable_bytes[at])
            step = int(np.argmin(high))
            if not high[step] and step + 1 < below:
                bound_s = max(bound_s, float(known.step_s[step, at]))
                self.queue.push(bound_s, layout.entry("pieces", candidate, 1, more))
                return
        self.excluded.counts["memory, in any number of pieces"] += 1

    def _first_step(
        self, layout: OpenLayout, candidate: Candidate, pieces: int, bound_s: float, after: int = 0
    ) -> tuple[float, int] | None:
        """(bound in seconds, step) of the lowest step of a candidate's share after `after` whose
        bytes may fit; None without such a step."""
        group, at = layout.group, layout.index
        result = group.of(candidate, pieces)
        if isinstance(result, Refused):
            self._no_plan(result)
            return None
        over = result.peak_bytes[:, at] - group.usable_bytes[at]
        last = min(len(over), layout.ends.get(candidate.in_one_piece, len(over) + 1) - 1)
        for step in range(after + 1, last + 1):
            host_over = result.host_bytes[step - 1, at] - group.problem.cost.host_room_bytes
            if host_over > 0:
                self.excluded.lacks_host(float(host_over))
                self.excluded.counts["host memory too small by a lower bound"] += 1
                return None  # no larger step of the share needs less host memory
            if over[step - 1] > 0:
                self.excluded.lacks_device(float(over[step - 1]))
                self.excluded.counts["device memory too small by a lower bound"] += 1
            elif (candidate, step) in layout.flat:
                self.excluded.counts["memory, in any number of pieces"] += 1
            else:
                return max(bound_s, float(result.step_s[step - 1, at])), step
        return None

    def may_fit(self, layout: OpenLayout) -> bool:
        """Whether a plan that keeps no activation may fit a layout, in pieces if a method has
        them."""
        if layout.holds is None:
            group, at = layout.group, layout.index
            pieces = [Candidate((variant,)) for variant in self.family.added if variant.cuts]
            least = min(float(group.least_bytes(each)[at]) for each in (None, *pieces))
            over = least - float(group.usable_bytes[at])
            layout.holds = over <= 0
            if over > 0:
                self.excluded.lacks_device(over)
                self.excluded.counts["device memory too small even for the smallest plans"] += 1
        return layout.holds

    def after_failure(
        self, bound_s: float, layout: OpenLayout, entry: QueueEntry, trial: Trial
    ) -> None:
        """Queue the work that follows a plan that does not fit."""
        candidate, result = entry.candidate, trial.result
        if self.queue.lean:
            self.queue.lean.doubts[layout.choice].append(candidate)
        self.excluded.note(trial, layout.trials)
        if self._refused(layout, entry, result.reason):
            layout.refused.add(candidate)
            self._expand_later(bound_s, layout, candidate)
            return
        if trial.host_short_bytes > 0:
            layout.ends.setdefault(candidate.in_one_piece, entry.step)
        elif result.reason == RESERVED:
            for other in self.family.instead(candidate):
                self.judge(bound_s, layout, other, entry.pieces)
        elif trial.short_bytes < inf:
            if candidate.pieces and layout.is_flat(candidate, entry.step, trial.short_bytes):
                layout.flat.add((candidate, entry.step))
            layout.short[candidate, entry.step] = trial.short_bytes
        self._next(bound_s, layout, entry, live=result.reason == RESERVED)

    def _refused(self, layout: OpenLayout, entry: QueueEntry, reason: str) -> bool:
        """Whether a candidate has no plan at any step and in any pieces: the last step in the most
        pieces is refused for the same `reason`, so the reason depends on neither."""
        candidate, trials = entry.candidate, layout.trials
        other = candidate.text(layout.group.steps(candidate), candidate.most_pieces)
        if not reason.startswith(NO_PLAN) or other == candidate.text(entry.step, entry.pieces):
            return False
        return planned_at(trials.job, trials.named(other), self.registry) == reason

    def settled(self, bound_s: float, layout: OpenLayout, entry: QueueEntry) -> bool:
        """Whether simulations since the entry was queued have shown that its plan cannot fit.  If
        so, queue the work that follows the plan."""
        if entry.candidate in layout.refused:
            return True
        cannot_fit = entry.step >= layout.ends.get(entry.candidate.in_one_piece, inf)
        if cannot_fit:
            self._next(bound_s, layout, entry)
        return cannot_fit

    def _next(
        self, bound_s: float, layout: OpenLayout, entry: QueueEntry, *, live: bool = False
    ) -> None:
        """Queue the next step of a candidate's share, the candidate in more pieces, or its
        expansion.  `live`: the plan's live bytes fit, so they also fit in more pieces, which need
        no probe then if there is no share, because their step is no shorter."""
        candidate = entry.candidate
        pieces, step, result = entry.pieces, entry.step, None
        if candidate.share:
            result = self.queue_step(layout, candidate, pieces, bound_s, step)
        frees = candidate.share or (candidate, 1) not in layout.flat
        if pieces < candidate.most_pieces and frees:
            stage: Stage = "pieces"
            more = (candidate, pieces + 1)
            if live and candidate.share is None and more not in layout.judged:
                stage = "simulate"
                layout.judged.add(more)
            self.queue.push(bound_s, layout.entry(stage, candidate, 1, pieces + 1))
        elif not result:
            self._expand_later(bound_s, layout, candidate)

    def queue_step(
        self, layout: OpenLayout, candidate: Candidate, pieces: int, bound_s: float, after: int = 0
    ) -> int | None:
        """Queue, with its own bound, the lowest step of a share after `after` whose bytes may fit,
        and return it.  This is done even if the step before fits, because a larger share may be
        faster, with other traffic on the host link or other operators in pieces."""
        result = self._first_step(layout, candidate, pieces, bound_s, after)
        if result is None:
            return None
        self.queue.push(result[0], layout.entry("tighten", candidate, result[1], pieces))
        return result[1]

    def _expand_later(self, bound_s: float, layout: OpenLayout, candidate: Candidate) -> None:
        """Queue the expansion of a candidate that does not fit.  With a share it is queued already,
        since the candidate was judged."""
        if candidate.share is None and not self.family.ends(candidate):
            self.queue.push(bound_s, layout.entry("expand", candidate))


AHEAD = 4
"""One in this many entries is the ripe entry with the lowest bound, so that some plan that fits is
known early.  Its bound must be below (1 - within) x the best step: the proof needs such entries."""
TIGHTENED, SIMULATED = 20, 30
"""Work of a bound by the schedule and of a simulation, in layers that a probe lowers in that
time."""


class Search:
    """A running search over the layouts of groups.  `work`: work so far, counted in layers that
    probes lower.  Layouts with fewer than `min_pp` pipeline ranks are left out.  With a queue in
    lean order, the search looks for any plan that fits: it starts with the leanest layouts and
    plans, bounds no seconds, skips plans that need at least as many bytes as plans that did not
    fit, and ends with the first plan that fits or an empty queue."""

    def __init__(
        self,
        alike: Sequence[Alike],
        family: PlanFamily,
        registry: Registry,
        *,
        engine: str = "",
        within: float = 0.0,
        min_pp: int = 1,
        queue: SearchQueue | None = None,
    ) -> None:
        self.alike, self.family, self.registry = alike, family, registry
        self.groups: list[BoundedGroup] = []
        self.engine, self.within, self.min_pp = engine, within, min_pp
        self.queue = SearchQueue() if queue is None else queue
        self.memory = MemoryRules(family, registry, self.queue)
        self.excluded = self.memory.excluded
        self.work = 0
        self._any_order = len(family.firsts) > 1
        for each in alike:
            entry = QueueEntry("alike", None, None, KEEP, alike=each)
            if len(each.makers) == 1 or self.queue.lean:
                self._make(0.0, entry)
            else:
                kernels_s = each.makers[0]().kernels_s(any_order=self._any_order, alike=True)
                self.queue.push(float(kernels_s.min()), entry)

    def _make(self, bound_s: float, entry: QueueEntry) -> None:
        """Queue groups that have room for the states, with their bounds by kernels."""
        assert entry.alike is not None
        for make in entry.alike.makers:
            group = make()
            self.groups.append(group)
            held = self.excluded.with_room(group.states_over_bytes)
            if held.any():
                kernels_s = group.kernels_s(any_order=self._any_order)[held]
                least_s = max(bound_s, float(kernels_s.min()))
                self.queue.push(least_s, QueueEntry("group", None, group, KEEP))

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
        """The fewest device bytes that any excluded plan, or the states of any layout, lacked."""
        self.excluded.replay_whole()
        return min(self.excluded.device_short_bytes, self.excluded.states_short_bytes)

    @property
    def gap(self) -> float:
        """The largest share of the best step that an unknown better plan may save."""
        none = inf if self.queue else 0.0
        return none if self.best_s == inf else max(0.0, 1.0 - self.bound_s / self.best_s)

    @property
    def ended(self) -> bool:
        """Whether a search for any plan that fits has found one."""
        return self.queue.lean is not None and self.best_s < inf

    def run(self) -> Iterator[Trial | None]:
        """Work until the queue is empty.  After each entry, yield the trial of the plan that it
        simulated, or None."""
        turn, entries, lean = 0, self.queue.entries, self.queue.lean
        while entries:
            ahead = turn % AHEAD == 0 and entries.ripe_bound < (1 - self.within) * self.best_s
            bound_s, entry = entries.pop(ripe=ahead)
            group = entry.layout.group if entry.layout else entry.group
            own = entry.stage not in ("layout", "alike")
            before = group.probed_layers if group else 0
            trial = self._take(0.0 if lean else bound_s, entry)
            if lean and entry.layout:
                lean.waiting[entry.layout.choice] -= 1
            none = not lean and self.best_s == self.queue.faster_than_s == inf
            if not entries and none:  # nothing fits, so the fewest missing bytes are wanted
                self.excluded.replay_whole()
                self.memory.measure_shortage()
            turn += own  # entries that only compare bounds do not count
            self.work += own + (group.probed_layers - before if group else 0)
            yield trial

    def note_step(self, step_s: float) -> None:
        """Note the step time, in seconds, of a plan that fits, of this or another process."""
        self.queue.best_s = min(self.queue.best_s, step_s)

    def list_all(self) -> None:
        """From now on, also search plans that cannot be the fastest: those that add a method to a
        plan that fits, and those that are much slower than the best."""
        self.excluded.counts.pop(EXTENDS_FITTING, None)
        self.queue.list_all()

    def _take(self, bound_s: float, entry: QueueEntry) -> Trial | None:
        layout, stage = entry.layout, entry.stage
        if layout is None:
            (self._open if entry.group else self._make)(bound_s, entry)
        elif layout.counted:
            self.excluded.counts["layout already has a plan that is fast enough"] += 1
        elif self._dominated(layout, entry.candidate, entry.step if stage in RIPE else 1):
            self.excluded.counts[EXTENDS_FITTING] += 1
            self.queue.postpone(bound_s, entry)
        elif stage in RIPE and self.memory.settled(bound_s, layout, entry):
            self.excluded.counts["memory too small or no plan, known from an earlier plan"] += 1
        elif stage in ("tighten", "grow") or (stage == "expand" and not layout.tightened):
            self._tighten(bound_s, layout, entry)
        elif stage == "expand":
            self._expand(bound_s, layout, entry.candidate)
        elif stage == "layout":
            for root in self.family.roots:
                self.memory.judge(bound_s, layout, root)
        elif stage in ("compose", "pieces"):
            self.memory.judge(bound_s, layout, entry.candidate, entry.pieces)
        else:
            return self._simulate(bound_s, layout, entry)
        return None

    def _open(self, bound_s: float, entry: QueueEntry) -> None:
        """Queue the layouts of a group whose states fit, with the bounds of its `firsts`."""
        group = entry.group
        assert group is not None
        room = [int(index) for index in (group.states_over_bytes <= 0).nonzero()[0]]
        if self.queue.lean:
            self._open_leanest(entry, self.queue.lean, [OpenLayout(group, at, {}) for at in room])
            return
        firsts = [one for one in map(group.of, self.family.firsts) if isinstance(one, Bounds)]
        for at in room:
            if group.choices[at].layout.pp >= self.min_pp:
                least_s = min((float(bounds.step_s[0, at]) for bounds in firsts), default=0.0)
                begun = OpenLayout(group, at, {}).entry("layout", KEEP)
                self.queue.push(max(bound_s, least_s), begun)

    def _open_leanest(
        self, entry: QueueEntry, lean: LeanOrder, layouts: Sequence[OpenLayout]
    ) -> None:
        """Judge all candidates at the layouts of a group that have no leaner layout.  At the second
        step judge the others, but only the doubtful candidates if the leaner layout was
        searched."""
        late = entry.step > 1
        for layout in layouts:
            choice, candidates, less = layout.choice, self.family.roots, leaner(layout.choice)
            if late == (less is None):
                continue
            if less in lean.searched and not lean.waiting[less]:
                self.excluded.counts["needs as much memory as with micro-batch 1"] += 1
                candidates = tuple(dict.fromkeys(lean.doubts[less]))
            lean.searched.add(choice)
            for candidate in candidates:
                self.memory.judge(0.0, layout, candidate)
        assert entry.group is not None
        if not late and any(map(leaner, entry.group.choices)):
            self.queue.push(0.0, QueueEntry("group", None, entry.group, KEEP, 2))

    def _dominated(self, layout: OpenLayout, candidate: Candidate, step: int = 1) -> bool:
        return not self.queue.listing and layout.extends_fitting(candidate, step)

    def _expand(self, bound_s: float, layout: OpenLayout, candidate: Candidate) -> None:
        """Queue the candidates with one more method than `candidate`, if the smallest plan may fit.
        A search for any fit first queues the leanest candidate of each family."""
        if not self.memory.may_fit(layout):
            return
        if self.queue.lean and candidate == KEEP:
            for leanest in self.family.leanest:
                self.queue.push(0.0, layout.entry("compose", leanest))
        for more in self.family.more(candidate):
            result = layout.entry("compose", more)
            if self._dominated(layout, more):
                self.queue.postpone(bound_s, result)
            else:
                self.queue.push(bound_s, result)

    def _tighten(self, bound_s: float, layout: OpenLayout, entry: QueueEntry) -> None:
        """Queue a candidate with its bound by the schedule, which also holds for all candidates
        composed of it, because none is faster.  A search for any fit goes on without bounds."""
        expands = entry.stage != "tighten"
        if self.queue.lean:
            if expands:
                self._expand(bound_s, layout, entry.candidate)
                return
        else:
            self.work += TIGHTENED
            layout.tightened = True
            tight_s = layout.group.tight_s(entry.candidate, entry.step, entry.pieces, layout.index)
            bound_s = max(bound_s, tight_s)
        stage: Stage = "expand" if expands else "simulate"
        self.queue.push(bound_s, layout.entry(stage, entry.candidate, entry.step, entry.pieces))

    def _simulate(self, bound_s: float, layout: OpenLayout, entry: QueueEntry) -> Trial | None:
        """Simulate a plan; if it does not fit, queue the next step of its scalars or its expansion.
        None if the same plan was simulated under another name."""
        self.work += SIMULATED
        candidate, trials = entry.candidate, layout.trials
        method = candidate.text(entry.step, entry.pieces)
        if self.engine and layout.engines is None:
            layout.engines = Engines(trials.problem, self.engine)
        trial = trials.trial(method, self.registry, bound_s=bound_s, engines=layout.engines)
        again = not trial.content or trial.content in layout.simulated
        layout.simulated.add(trial.content)
        step_s = trial.result.fitting_s
        if not trial.result.fits:
            self.excluded.counts[trial.result.reason.split(":")[0]] += 1
            self.memory.after_failure(bound_s, layout, entry, trial)
        else:
            if entry.pieces == 1:
                layout.fits[candidate] = min(entry.step, layout.fits.get(candidate, entry.step))
            if candidate.share:
                self.memory.queue_step(layout, candidate, entry.pieces, bound_s, entry.step)
            elif not self.family.ends(candidate):  # with a share, `judge` queues it
                self.queue.postpone(step_s, layout.entry("expand", candidate))
            self.note_step(step_s)
            layout.counted = step_s < self.queue.faster_than_s < inf
        return None if again else replace(trial, candidate=trials.named(candidate.text(1)))
