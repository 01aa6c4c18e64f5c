"""What memory excludes: which plans of an arm may fit a layout by lower bounds of their bytes, and
what a simulated plan that does not fit says of the plans of its arm that are left."""

from collections import Counter
from functools import partial
from math import inf
from operator import itemgetter

import numpy as np

from rematbench.advise.search.candidates import Arm, Tree
from rematbench.advise.search.closed_bounds import Bounds
from rematbench.advise.search.probes import Refused
from rematbench.advise.search.queue import (
    Fallen,
    Item,
    Place,
    SearchQueue,
    Stage,
    in_one_piece,
    most_pieces,
)
from rematbench.advise.search.trials import NO_PLAN, RESERVED, Site, Trial, planned_at
from rematbench.plugins.registry import Registry

COPIED, KEPT = "host memory, by what is copied", "device memory, by what is kept"
"""Why an arm falls that is not probed."""


class Exclusions:
    """What a search has excluded.  `counts`: plans and layouts by reason; `device_short_bytes`,
    `host_short_bytes`: the fewest device bytes, and host bytes of a node, that an excluded plan
    lacked; `refusal`: the last reason why a method has no plan."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.device_short_bytes = self.host_short_bytes = inf
        self.refusal = ""

    def lacks_device(self, nbytes: float) -> None:
        """Take note of the device bytes that a plan lacks."""
        self.device_short_bytes = min(self.device_short_bytes, nbytes)

    def lacks_host(self, nbytes: float) -> None:
        """Take note of the host bytes of a node that a plan lacks."""
        self.host_short_bytes = min(self.host_short_bytes, nbytes)


class MemoryRules:
    """The rules by which a search queues an arm where its bytes may fit, and counts it as excluded
    where they do not.  `excluded`: what the search has excluded."""

    def __init__(self, tree: Tree, registry: Registry, queue: SearchQueue) -> None:
        self.tree, self.registry, self.queue = tree, registry, queue
        self.excluded = Exclusions()
        self._fallen: list[Fallen] = []
        self._ended: list[tuple[float, Site, bytes]] = []  # plans, by the least bytes they lack

    def judge(self, bound_s: float, place: Place, arm: Arm, pieces: int = 1) -> None:
        """Queue an arm at a layout, at the least step of its line whose bytes may fit; where no
        step may fit, queue the expansion of the arm, and that of an arm with a line in any case:
        with one more method a smaller share may do.  An arm in a number of pieces is judged once:
        judging fewer pieces, and a plan of fewer pieces that does not fit, both ask for more, but
        where host memory is short, which pieces do not change."""
        if self.queue.lean and self._refused_in_any_pieces(place, arm, pieces):
            return
        if (arm, pieces) in place.judged:
            return
        place.judged.add((arm, pieces))
        if arm.pieces and place.ends.get(in_one_piece(arm)) == 1:
            self.excluded.counts["host memory, in any pieces"] += 1
            return
        if pieces == 1 and self.tree.ends_next(arm) and self.falls(place, arm):
            for more in self.tree.more(arm):
                self.queue.push(bound_s, Item("made", place, None, more))
            return
        bounds, at = place.bounds, place.index
        found = self._first_step(place, arm, pieces, bound_s)
        if found:
            self.queue.push(found[0], Item("closed", place, None, arm, found[1], pieces))
        if arm.pieces is None:
            grows = (arm.line or not found) and not self.tree.ends(arm)
            known = bounds.of(arm) if grows else None
            if isinstance(known, Bounds):
                bound = max(bound_s, float(known.step_s[0, at]))
                self.queue.push(bound, Item("grow" if arm.line else "expand", place, None, arm))
            return
        if pieces < most_pieces(arm) and (not found or found[1] > 1):
            self._ask_pieces(place, arm, pieces, bound_s, found[1] if found else inf)

    def _refused_in_any_pieces(self, place: Place, arm: Arm, pieces: int) -> bool:
        """Whether a search for any fit leaves an arm without a plan out at once."""
        assert self.queue.lean is not None
        found = place.shard.probe(arm, pieces)
        if not isinstance(found, Refused):
            return False
        self.queue.lean.doubts[place.choice].append(arm)
        if found == place.shard.probe(arm, most_pieces(arm)):  # the same reason at both ends
            self.excluded.counts["no plan"] += 1
            self.excluded.refusal = found.reason
            return True
        return False

    def falls(self, place: Place, arm: Arm) -> bool:
        """Whether an arm does not fit by what it keeps and copies.  It is not probed, unless
        nothing fits and what it lacks may be the least."""
        short = place.bounds.short(arm)
        found = short.falls[place.index] if short is not None else None
        if found is None:
            return False
        nbytes, host = found
        self.excluded.counts[COPIED if host else KEPT] += 1
        self._fallen.append(Fallen(nbytes, host, place, arm))
        return True

    def measure_shortage(self) -> None:
        """Probe the arms that fell unprobed, as long as what they lack may be the least."""
        for fallen in sorted(self._fallen, key=lambda one: (one.host, one.nbytes)):
            least = (
                self.excluded.host_short_bytes if fallen.host else self.excluded.device_short_bytes
            )
            if fallen.nbytes < least and not (
                fallen.host and self.excluded.device_short_bytes < inf
            ):
                self._first_step(fallen.place, fallen.arm, 1, 0.0)
        self._fallen.clear()

    def _ask_pieces(
        self, place: Place, arm: Arm, pieces: int, bound_s: float, below: float
    ) -> None:
        """Queue an arm in the fewest pieces (more than `pieces`) in which its bytes may fit at a
        step less than `below`.  Pieces change neither the kept bytes nor the host bytes.  A search
        for any fit asks only where the bytes that the arm keeps leave room for any pieces."""
        assert arm.pieces is not None
        if self.queue.lean and not self.may_fit(place, arm.without(arm.pieces), Arm((arm.pieces,))):
            return
        bounds, at = place.bounds, place.index
        known = bounds.of(arm, pieces)
        if isinstance(known, Refused):
            self.queue.push(bound_s, Item("pieces", place, None, arm, 1, pieces + 1))
            return
        fewer = max((had for one, had in place.judged if one == arm and had < pieces), default=0)
        over = known.host_bytes[:, at] > bounds.shard.problem.cost.host_room_bytes
        for more in range(pieces + 1, most_pieces(arm) + 1):
            high = over
            if fewer:
                peak_bytes = bounds.in_more_pieces(arm, fewer, pieces, more)[:, at]
                high = over | (peak_bytes > bounds.shard.usable_bytes[at])
            step = int(np.argmin(high))
            if not high[step] and step + 1 < below:
                bound_s = max(bound_s, float(known.step_s[step, at]))
                self.queue.push(bound_s, Item("pieces", place, None, arm, 1, more))
                return
        self.excluded.counts["memory, in any pieces"] += 1

    def _first_step(
        self, place: Place, arm: Arm, pieces: int, bound_s: float, after: int = 0
    ) -> tuple[float, int] | None:
        """(bound in seconds, step) of the least step of an arm's line after `after` whose bytes may
        fit; None without such a step."""
        bounds, at = place.bounds, place.index
        found = bounds.of(arm, pieces)
        if isinstance(found, Refused):
            self.excluded.counts["no plan"] += 1
            self.excluded.refusal = found.reason
            return None
        over = found.peak_bytes[:, at] - bounds.shard.usable_bytes[at]
        last = min(len(over), place.ends.get(in_one_piece(arm), len(over) + 1) - 1)
        for step in range(after + 1, last + 1):
            host_over = found.host_bytes[step - 1, at] - bounds.shard.problem.cost.host_room_bytes
            if host_over > 0:
                self.excluded.lacks_host(float(host_over))
                self.excluded.counts["host memory, by its bound"] += 1
                return None  # no larger step of the line needs less host memory
            if over[step - 1] > 0:
                self.excluded.lacks_device(float(over[step - 1]))
                self.excluded.counts["device memory, by its bound"] += 1
            elif (arm, step) in place.flat:
                self.excluded.counts["memory, in any pieces"] += 1
            else:
                return max(bound_s, float(found.step_s[step - 1, at])), step
        return None

    def may_fit(self, place: Place, lean: Arm, pieces: Arm | None) -> bool:
        if (lean, pieces) not in place.families:
            place.families[lean, pieces] = self._holds(place, lean, pieces)
        return place.families[lean, pieces]

    def _holds(self, place: Place, lean: Arm, pieces: Arm | None) -> bool:
        shard, minimum = place.shard, place.bounds.minimum
        for bytes_of in (minimum.of_all, partial(minimum.of_family, lean)):
            over = float((bytes_of(pieces) - shard.usable_bytes)[place.index])
            if over > 0:
                self.excluded.lacks_device(over)
                return False
        return True

    def after_failure(self, bound_s: float, place: Place, item: Item, trial: Trial) -> None:
        """Queue the work that follows a plan that does not fit."""
        arm, result = item.arm, trial.result
        if self.queue.lean:
            self.queue.lean.doubts[place.choice].append(arm)
        host_short_bytes = -result.verdict.host_headroom_bytes if result.verdict else 0
        self._note_shortage(place, trial, host_short_bytes)
        if self._refused(place, item, result.reason):
            place.refused.add(arm)
            self._expand_later(bound_s, place, arm)
            return
        if host_short_bytes > 0:
            place.ends.setdefault(in_one_piece(arm), item.step)
        elif result.reason == RESERVED:
            for other in self.tree.instead(arm):
                self.judge(bound_s, place, other, item.pieces)
        elif trial.short_bytes < inf:
            if arm.pieces and self._is_flat(place, item, trial.short_bytes):
                place.flat.add((arm, item.step))
            place.short[arm, item.step] = trial.short_bytes
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
        """Find what plans lack whose replay ended early, as long as it may be the least."""
        for short_bytes, site, content in sorted(self._ended, key=itemgetter(0)):
            if short_bytes < self.excluded.device_short_bytes:
                self.excluded.lacks_device(site.lacked_bytes(content))
        self._ended.clear()

    def _is_flat(self, place: Place, item: Item, short_bytes: float) -> bool:
        """Whether more pieces, or pieces at all, freed no live bytes at a step.  A peak of live
        bytes is a maximum of lines in 1 / pieces: once constant, it stays so.  What the allocator
        reserves is no such maximum."""
        fewer = (place.short.get((one, item.step)) for one in (item.arm, in_one_piece(item.arm)))
        return short_bytes in fewer

    def _refused(self, place: Place, item: Item, reason: str) -> bool:
        """Whether an arm has no plan at the last step and in the most pieces either, for the same
        reason: then the reason depends on neither the step nor the pieces."""
        arm, site = item.arm, place.site
        other = arm.text(place.shard.steps(arm), most_pieces(arm))
        if not reason.startswith(NO_PLAN) or other == arm.text(item.step, item.pieces):
            return False
        return planned_at(site.job, other, self.registry) == reason

    def settled(self, bound_s: float, place: Place, item: Item) -> bool:
        """Whether simulations after the entry was queued show that its plan cannot fit; where they
        do, the work that follows the plan is queued."""
        arm = item.arm
        if arm in place.refused:
            return True
        if item.step < place.ends.get(in_one_piece(arm), inf):
            return False
        self._next(bound_s, place, item)
        return True

    def _next(self, bound_s: float, place: Place, item: Item, *, live: bool = False) -> None:
        """Queue the next step of an arm's line, the arm in more pieces, or its expansion.  `live`:
        the plan's live bytes fit, as they do in more pieces, so that without a line these need no
        probe: their step is no shorter."""
        arm = item.arm
        found = arm.line is not None and self.queue_next_step(bound_s, place, item)
        if item.pieces < most_pieces(arm) and (arm.line or (arm, 1) not in place.flat):
            stage: Stage = "pieces"
            if live and arm.line is None and (arm, item.pieces + 1) not in place.judged:
                stage = "tight"
                place.judged.add((arm, item.pieces + 1))
            self.queue.push(bound_s, Item(stage, place, None, arm, 1, item.pieces + 1))
        elif not found:
            self._expand_later(bound_s, place, arm)

    def queue_next_step(self, bound_s: float, place: Place, item: Item) -> bool:
        """Queue the next step of an arm's line, where there is any.  It waits with its own bound
        also where the step before fits: a larger share may be faster, beside other traffic of the
        host link or with other operators in pieces."""
        arm = item.arm
        found = self._first_step(place, arm, item.pieces, bound_s, item.step)
        if found:
            self.queue.push(found[0], Item("closed", place, None, arm, found[1], item.pieces))
        return found is not None

    def _expand_later(self, bound_s: float, place: Place, arm: Arm) -> None:
        """Queue the expansion of an arm that does not fit; that of an arm with a line was queued
        when the arm was judged, by the bound of the line's first step."""
        if arm.line is None and not self.tree.ends(arm):
            self.queue.push(bound_s, Item("expand", place, None, arm))
