"""Exclusion by memory: lower bounds of bytes decide which plans of a candidate may fit a layout,
and a simulated plan that does not fit may exclude further plans of its candidate."""

from collections import Counter
from math import inf
from operator import itemgetter

import numpy as np

from rematbench.advise.search.candidates import Candidate, Tree
from rematbench.advise.search.closed_bounds import Bounds
from rematbench.advise.search.probes import Refused
from rematbench.advise.search.queue import (
    Item,
    Place,
    SearchQueue,
    Stage,
    Unprobed,
    in_one_piece,
    most_pieces,
)
from rematbench.advise.search.trials import NO_PLAN, RESERVED, Site, Trial, planned_at
from rematbench.plugins.registry import Registry

COPIED, KEPT = (
    "host memory too small for the bytes that are copied",
    "device memory too small for the bytes that are kept",
)
"""Why a candidate falls that is not probed."""


class Exclusions:
    """The plans and layouts that a search has excluded.  `counts`: plans and layouts by reason.
    `device_short_bytes`, `host_short_bytes`: the fewest device bytes, and host bytes of a node,
    that an excluded plan lacked.  `refusal`: the last reason why a method has no plan."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.device_short_bytes = self.host_short_bytes = inf
        self.refusal = ""

    def lacks_device(self, nbytes: float) -> None:
        """Note the device bytes that a plan lacks."""
        self.device_short_bytes = min(self.device_short_bytes, nbytes)

    def lacks_host(self, nbytes: float) -> None:
        """Note the host bytes of a node that a plan lacks."""
        self.host_short_bytes = min(self.host_short_bytes, nbytes)


class MemoryRules:
    """The rules by which a search queues a candidate if its bytes may fit, and otherwise counts it
    as excluded.  `excluded`: the plans and layouts that the search has excluded."""

    def __init__(self, tree: Tree, registry: Registry, queue: SearchQueue) -> None:
        self.tree, self.registry, self.queue = tree, registry, queue
        self.excluded = Exclusions()
        self._unprobed: list[Unprobed] = []
        self._ended: list[tuple[float, Site, bytes]] = []  # plans, by the fewest bytes they lack

    def judge(self, bound_s: float, place: Place, candidate: Candidate, pieces: int = 1) -> None:
        """Queue a candidate at a layout, at the lowest step of its share whose bytes may fit.  If
        no step may fit, queue the candidate's expansion.  With a share, queue the expansion in any
        case, because a smaller share may suffice with one more method.  Each number of pieces is
        judged once, although both the judgment and the failed plan of fewer pieces request it.  If
        host memory is short, they do not: pieces do not change host bytes."""
        if (candidate, pieces) in place.judged:
            return
        place.judged.add((candidate, pieces))
        if candidate.pieces and place.ends.get(in_one_piece(candidate)) == 1:
            self.excluded.counts["host memory too small for any number of pieces"] += 1
            return
        if pieces == 1 and self.tree.ends_next(candidate) and self.lacks_bytes(place, candidate):
            for more in self.tree.more(candidate):
                self.queue.push(bound_s, Item("compose", place, None, more))
            return
        if self.queue.lean and self._refused_in_any_pieces(place, candidate, pieces):
            return
        bounds, at = place.bounds, place.index
        found = self._first_step(place, candidate, pieces, bound_s)
        if found:
            self.queue.push(found[0], Item("tighten", place, None, candidate, found[1], pieces))
        if candidate.pieces is None:
            grows = (candidate.share or not found) and not self.tree.ends(candidate)
            known = bounds.of(candidate) if grows else None
            if isinstance(known, Bounds):
                bound = max(bound_s, float(known.step_s[0, at]))
                self.queue.push(
                    bound, Item("grow" if candidate.share else "expand", place, None, candidate)
                )
            return
        if pieces < most_pieces(candidate) and (not found or found[1] > 1):
            self._ask_pieces(place, candidate, pieces, bound_s, found[1] if found else inf)

    def _refused_in_any_pieces(self, place: Place, candidate: Candidate, pieces: int) -> bool:
        """Whether a search for any fit leaves a candidate without a plan out at once."""
        assert self.queue.lean is not None
        found = place.shard.probe(candidate, pieces)
        if not isinstance(found, Refused):
            return False
        self.queue.lean.doubts[place.choice].append(candidate)
        if found == place.shard.probe(
            candidate, most_pieces(candidate)
        ):  # the same reason at both ends
            self.excluded.counts["no plan"] += 1
            self.excluded.refusal = found.reason
            return True
        return False

    def lacks_bytes(self, place: Place, candidate: Candidate) -> bool:
        """Whether a candidate does not fit because of the bytes that it keeps and copies.  Such a
        candidate is not probed, unless nothing fits and the bytes that it lacks may be the
        fewest."""
        short = place.bounds.short(candidate)
        found = short.falls[place.index] if short is not None else None
        if found is None:
            return False
        nbytes, host = found
        self.excluded.counts[COPIED if host else KEPT] += 1
        self._unprobed.append(Unprobed(nbytes, host, place, candidate))
        return True

    def measure_shortage(self) -> None:
        """Probe the candidates that were excluded without a probe, as long as the bytes that they
        lack may be the fewest."""
        for unprobed in sorted(self._unprobed, key=lambda one: (one.host, one.nbytes)):
            least = (
                self.excluded.host_short_bytes
                if unprobed.host
                else self.excluded.device_short_bytes
            )
            if unprobed.nbytes < least and not (
                unprobed.host and self.excluded.device_short_bytes < inf
            ):
                self._first_step(unprobed.place, unprobed.candidate, 1, 0.0)
        self._unprobed.clear()

    def _ask_pieces(
        self, place: Place, candidate: Candidate, pieces: int, bound_s: float, below: float
    ) -> None:
        """Queue a candidate in the fewest pieces (more than `pieces`) in which its bytes may fit at
        a step less than `below`.  Pieces change neither the kept bytes nor the host bytes."""
        bounds, at = place.bounds, place.index
        known = bounds.of(candidate, pieces)
        if isinstance(known, Refused):
            self.queue.push(bound_s, Item("pieces", place, None, candidate, 1, pieces + 1))
            return
        fewer = max(
            (had for one, had in place.judged if one == candidate and had < pieces), default=0
        )
        over = known.host_bytes[:, at] > bounds.shard.problem.cost.host_room_bytes
        for more in range(pieces + 1, most_pieces(candidate) + 1):
            high = over
            if fewer:
                peak_bytes = bounds.in_more_pieces(candidate, fewer, pieces, more)[:, at]
                high = over | (peak_bytes > bounds.shard.usable_bytes[at])
            step = int(np.argmin(high))
            if not high[step] and step + 1 < below:
                bound_s = max(bound_s, float(known.step_s[step, at]))
                self.queue.push(bound_s, Item("pieces", place, None, candidate, 1, more))
                return
        self.excluded.counts["memory, in any number of pieces"] += 1

    def _first_step(
        self, place: Place, candidate: Candidate, pieces: int, bound_s: float, after: int = 0
    ) -> tuple[float, int] | None:
        """(bound in seconds, step) of the lowest step of a candidate's share after `after` whose
        bytes may fit; None without such a step."""
        bounds, at = place.bounds, place.index
        found = bounds.of(candidate, pieces)
        if isinstance(found, Refused):
            self.excluded.counts["no plan"] += 1
            self.excluded.refusal = found.reason
            return None
        over = found.peak_bytes[:, at] - bounds.shard.usable_bytes[at]
        last = min(len(over), place.ends.get(in_one_piece(candidate), len(over) + 1) - 1)
        for step in range(after + 1, last + 1):
            host_over = found.host_bytes[step - 1, at] - bounds.shard.problem.cost.host_room_bytes
            if host_over > 0:
                self.excluded.lacks_host(float(host_over))
                self.excluded.counts["host memory too small by a lower bound"] += 1
                return None  # no larger step of the share needs less host memory
            if over[step - 1] > 0:
                self.excluded.lacks_device(float(over[step - 1]))
                self.excluded.counts["device memory too small by a lower bound"] += 1
            elif (candidate, step) in place.flat:
                self.excluded.counts["memory, in any number of pieces"] += 1
            else:
                return max(bound_s, float(found.step_s[step - 1, at])), step
        return None

    def may_fit(self, place: Place) -> bool:
        """Whether a plan that keeps no activation may fit a layout, in pieces if any method has
        them."""
        if place.holds is None:
            pieces = [Candidate((one,)) for one in self.tree.added if one.cuts]
            least = min(
                float(place.bounds.minimum.of_all(one)[place.index]) for one in (None, *pieces)
            )
            over = least - float(place.shard.usable_bytes[place.index])
            place.holds = over <= 0
            if over > 0:
                self.excluded.lacks_device(over)
                self.excluded.counts["device memory too small even for the smallest plans"] += 1
        return place.holds

    def after_failure(self, bound_s: float, place: Place, item: Item, trial: Trial) -> None:
        """Queue the work that follows a plan that does not fit."""
        candidate, result = item.candidate, trial.result
        if self.queue.lean:
            self.queue.lean.doubts[place.choice].append(candidate)
        host_short_bytes = -result.verdict.host_headroom_bytes if result.verdict else 0
        self._note_shortage(place, trial, host_short_bytes)
        if self._refused(place, item, result.reason):
            place.refused.add(candidate)
            self._expand_later(bound_s, place, candidate)
            return
        if host_short_bytes > 0:
            place.ends.setdefault(in_one_piece(candidate), item.step)
        elif result.reason == RESERVED:
            for other in self.tree.instead(candidate):
                self.judge(bound_s, place, other, item.pieces)
        elif trial.short_bytes < inf:
            if candidate.pieces and self._is_flat(place, item, trial.short_bytes):
                place.flat.add((candidate, item.step))
            place.short[candidate, item.step] = trial.short_bytes
        self._next(bound_s, place, item, live=result.reason == RESERVED)

    def _note_shortage(self, place: Place, trial: Trial, host_short_bytes: float) -> None:
        """Take note of what a plan lacks, or why there is none."""
        if trial.at_least:
            self._ended.append((trial.short_bytes, place.site, trial.content))
        else:
            self.excluded.lacks_device(trial.short_bytes)
        if trial.result.reason.startswith(NO_PLAN):
            self.excluded.refusal = trial.result.reason.removeprefix(NO_PLAN)
        if host_short_bytes > 0:
            self.excluded.lacks_host(host_short_bytes)

    def replay_whole(self) -> None:
        """Replay in full the plans whose replay ended early, as long as the bytes that they lack
        may be the fewest."""
        for short_bytes, site, content in sorted(self._ended, key=itemgetter(0)):
            if short_bytes < self.excluded.device_short_bytes:
                self.excluded.lacks_device(site.lacked_bytes(content))
        self._ended.clear()

    def _is_flat(self, place: Place, item: Item, short_bytes: float) -> bool:
        """Whether more pieces, or pieces at all, freed no live bytes at a step.  A peak of live
        bytes is a maximum of lines in 1 / pieces: once constant, it stays so.  What the allocator
        reserves is no such maximum."""
        fewer = (
            place.short.get((one, item.step))
            for one in (item.candidate, in_one_piece(item.candidate))
        )
        return short_bytes in fewer

    def _refused(self, place: Place, item: Item, reason: str) -> bool:
        """Whether a candidate has no plan at the last step and in the most pieces either, for the
        same reason: then the reason depends on neither the step nor the pieces."""
        candidate, site = item.candidate, place.site
        other = candidate.text(place.shard.steps(candidate), most_pieces(candidate))
        if not reason.startswith(NO_PLAN) or other == candidate.text(item.step, item.pieces):
            return False
        return planned_at(site.job, site.named(other), self.registry) == reason

    def settled(self, bound_s: float, place: Place, item: Item) -> bool:
        """Whether simulations after the entry was queued show that its plan cannot fit.  If so,
        queue the work that follows the plan."""
        candidate = item.candidate
        if candidate in place.refused:
            return True
        if item.step < place.ends.get(in_one_piece(candidate), inf):
            return False
        self._next(bound_s, place, item)
        return True

    def _next(self, bound_s: float, place: Place, item: Item, *, live: bool = False) -> None:
        """Queue the next step of a candidate's share, the candidate in more pieces, or its
        expansion.  `live`: the plan's live bytes fit, as they do in more pieces, so that without a
        share these need no probe: their step is no shorter."""
        candidate = item.candidate
        found = candidate.share is not None and self.queue_next_step(bound_s, place, item)
        if item.pieces < most_pieces(candidate) and (
            candidate.share or (candidate, 1) not in place.flat
        ):
            stage: Stage = "pieces"
            if (
                live
                and candidate.share is None
                and (candidate, item.pieces + 1) not in place.judged
            ):
                stage = "simulate"
                place.judged.add((candidate, item.pieces + 1))
            self.queue.push(bound_s, Item(stage, place, None, candidate, 1, item.pieces + 1))
        elif not found:
            self._expand_later(bound_s, place, candidate)

    def queue_next_step(self, bound_s: float, place: Place, item: Item) -> bool:
        """Queue the next step of a candidate's share, if there is one, with its own bound.  This is
        done even if the step before fits: a larger share may be faster, with different host-link
        traffic or different operators in pieces."""
        candidate = item.candidate
        found = self._first_step(place, candidate, item.pieces, bound_s, item.step)
        if found:
            self.queue.push(
                found[0], Item("tighten", place, None, candidate, found[1], item.pieces)
            )
        return found is not None

    def _expand_later(self, bound_s: float, place: Place, candidate: Candidate) -> None:
        """Queue the expansion of a candidate that does not fit; that of a candidate with a share
        was queued when the candidate was judged, by the bound of the share's first step."""
        if candidate.share is None and not self.tree.ends(candidate):
            self.queue.push(bound_s, Item("expand", place, None, candidate))
