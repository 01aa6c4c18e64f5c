"""What a search tries after a plan that does not fit."""

from math import inf
from operator import itemgetter

from rematbench.advise.search.arms import Arm
from rematbench.advise.search.judge import Judge
from rematbench.advise.search.place import Item, Place, Stage, in_one_piece, most_pieces
from rematbench.advise.search.site import Site
from rematbench.advise.search.tree import Tree
from rematbench.advise.search.trial import NO_PLAN, RESERVED, Tried, lacked_bytes, planned_at
from rematbench.plugins.registry import Registry


class Follow(Judge):
    """What the failure of a simulated plan says of the plans of its arm that are left."""

    def __init__(self, tree: Tree, registry: Registry) -> None:
        super().__init__(tree)
        self.registry = registry
        self._ended: list[tuple[float, Site, bytes]] = []  # plans, by the least bytes they lack

    def _go_on(self, bound_s: float, place: Place, item: Item, tried: Tried) -> None:
        """Queue the work that follows a plan that does not fit."""
        arm = item.arm
        if tried.at_least:
            self._ended.append((tried.short_bytes, place.site, tried.content))
        else:
            self._short(tried.short_bytes)
        if tried.reason.startswith(NO_PLAN):
            self.refusal = tried.reason.removeprefix(NO_PLAN)
        if tried.verdict and tried.verdict.host_headroom_bytes < 0:
            self.host_short_bytes = min(self.host_short_bytes, -tried.verdict.host_headroom_bytes)
        if self._refused(place, item, tried.reason):
            place.refused.add(arm)
            self._expand_later(bound_s, place, arm)
            return
        if tried.verdict and tried.verdict.host_headroom_bytes < 0:
            place.ends.setdefault(in_one_piece(arm), item.step)
        elif tried.reason == RESERVED:
            for other in self.tree.instead(arm):
                self._judge(bound_s, place, other, item.pieces)
        elif tried.short_bytes < inf:
            if arm.pieces and self._is_flat(place, item, tried.short_bytes):
                place.flat.add((arm, item.step))
            place.short[arm, item.step] = tried.short_bytes
        self._next(bound_s, place, item, live=tried.reason == RESERVED)

    def _replay_whole(self) -> None:
        """Find what plans lack whose replay ended early, as long as it may be the least."""
        for short_bytes, site, content in sorted(self._ended, key=itemgetter(0)):
            if short_bytes < self.plans_short_bytes:
                self._short(lacked_bytes(site.problem, site.trials.ended[content]))
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
        return planned_at(site.choice, site.problem, other, self.registry) == reason

    def _settled(self, bound_s: float, place: Place, item: Item) -> bool:
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
        found = arm.line is not None and self._go_along(bound_s, place, item)
        if item.pieces < most_pieces(arm) and (arm.line or (arm, 1) not in place.flat):
            stage: Stage = "pieces"
            if live and arm.line is None and (arm, item.pieces + 1) not in place.judged:
                stage = "tight"
                place.judged.add((arm, item.pieces + 1))
            self._push(bound_s, Item(stage, place, None, arm, 1, item.pieces + 1))
        elif not found:
            self._expand_later(bound_s, place, arm)

    def _go_along(self, bound_s: float, place: Place, item: Item) -> bool:
        """Queue the next step of an arm's line, where there is any.  It waits with its own bound
        also where the step before fits: a larger share may be faster, beside other traffic of the
        host link or with other operators in pieces."""
        arm = item.arm
        found = self._least(place, arm, item.pieces, bound_s, item.step)
        if found:
            self._push(found[0], Item("closed", place, None, arm, found[1], item.pieces))
        return found is not None

    def _expand_later(self, bound_s: float, place: Place, arm: Arm) -> None:
        """Queue the expansion of an arm that does not fit; that of an arm with a line was queued
        when the arm was judged, by the bound of the line's first step."""
        if arm.line is None and not self.tree.ends(arm):
            self._push(bound_s, Item("expand", place, None, arm))
