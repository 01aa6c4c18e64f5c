"""A search for any plan that fits: the leanest layouts and plans first, and no seconds bounded.

It tries the plans of `Search`, leaves out those of no fewer bytes than plans that did not fit, and
ends with the first plan that fits or with an empty queue: then no plan of the space fits.
"""

from collections import Counter, defaultdict
from functools import cached_property
from math import inf

from msgspec.structs import replace

from rematbench.advise.search.arms import KEEP, Arm
from rematbench.advise.search.frontier import Search
from rematbench.advise.search.place import RIPE, Item, Place, most_pieces
from rematbench.advise.search.probe import Refused
from rematbench.advise.search.space import Choice
from rematbench.advise.search.trial import Tried

LATER = 1e6
"""Added to the order of work that waits for all leaner work."""


class AnyFit(Search):
    """One search for a plan that fits.  `best_s` is the step of the plan that is found."""

    @property
    def bound_s(self) -> float:
        """Nothing is known of seconds: 0, and infinite once no plan is left."""
        return 0.0 if self.queue else inf

    @property
    def ended(self) -> bool:
        """Whether a plan that fits is known."""
        return self.best_s < inf

    @cached_property
    def _searched(self) -> set[Choice]:
        """Layouts whose arms are judged."""
        return set()

    @cached_property
    def _waiting(self) -> Counter[Choice]:
        """Entries of the queue, by layout."""
        return Counter()

    @cached_property
    def _doubts(self) -> dict[Choice, list[Arm]]:
        """Arms by layout that were left out for another reason than bytes that are surely needed:
        more sequences in a micro-batch may change that reason."""
        return defaultdict(list)

    @cached_property
    def _lean(self) -> set[Arm]:
        """The leanest arm of each family, with its pieces."""
        return {_cut(lean, cut) for lean, cut in self.tree.families}

    def _push(self, bound_s: float, item: Item) -> None:
        ripe = item.stage in RIPE
        self.queue.push(-1.0 if ripe else self._order(item), item, ripe=ripe)
        if item.place:
            self._waiting[item.place.choice] += 1

    def _order(self, item: Item) -> float:
        """Lean layouts come first, and on all layouts the leanest arms.  Layouts with a leaner one
        come last."""
        if item.place is None:
            assert item.shard is not None
            shares = item.shard.least.shares[item.shard.states_over_bytes <= 0]
            return float(shares.min()) + 2 * LATER * (item.step - 1)
        order = float(item.place.shard.least.shares[item.place.index])
        first = item.arm in self._lean or item.arm == KEEP
        less = leaner(item.place.choice)
        return order + (0.0 if first else LATER) + (0.0 if less is None else 2 * LATER)

    def _take(self, bound_s: float, item: Item) -> Tried | None:
        if item.place is None:
            self._open_some(item)
            return None
        found = super()._take(0.0, item)
        self._waiting[item.place.choice] -= 1
        return found

    def _open_some(self, item: Item) -> None:
        """Queue the layouts of a shard that none is leaner than, with all arms; at the second step
        the others, with the doubtful arms of the leaner layout where that has been searched."""
        shard = item.shard
        assert shard is not None
        late = item.step > 1
        for at in map(int, (shard.states_over_bytes <= 0).nonzero()[0]):
            choice = shard.choices[at]
            less = leaner(choice)
            if late == (less is None):
                continue
            place, arms = Place(shard, at, {}), self.tree.roots
            if less in self._searched and not self._waiting[less]:
                self.fell["no leaner than with micro-batch 1"] += 1
                arms = tuple(dict.fromkeys(self._doubts[less]))
            self._searched.add(choice)
            for arm in arms:
                self._judge(0.0, place, arm)
        if not late and any(map(leaner, shard.choices)):
            self._push(0.0, Item("shard", None, shard, KEEP, 2))

    def _judge(self, bound_s: float, place: Place, arm: Arm, pieces: int = 1) -> None:
        found = place.shard.probe(arm, pieces)
        if isinstance(found, Refused):
            self._doubts[place.choice].append(arm)
            if found == place.shard.probe(arm, most_pieces(arm)):  # the same reason at both ends
                self.fell["no plan"] += 1
                self.refusal = found.reason
                return
        super()._judge(bound_s, place, arm, pieces)

    def _ask_pieces(
        self, place: Place, arm: Arm, pieces: int, bound_s: float, below: float
    ) -> None:
        """Ask for more pieces where the bytes that the arm keeps leave room for any."""
        assert arm.pieces is not None
        if self._may_fit(place, arm.without(arm.pieces), Arm((arm.pieces,))):
            super()._ask_pieces(place, arm, pieces, bound_s, below)

    def _expand(self, bound_s: float, place: Place, arm: Arm) -> None:
        """Queue the leanest arm of each family before the arms with one more method."""
        if arm == KEEP:
            for lean, cut in self.tree.families:
                if self._may_fit(place, lean, cut):
                    self._push(0.0, Item("made", place, None, _cut(lean, cut)))
        super()._expand(bound_s, place, arm)

    def _tighten(self, bound_s: float, place: Place, item: Item) -> None:
        """Go on without a bound of seconds."""
        if item.stage in ("grow", "expand"):
            self._expand(bound_s, place, item.arm)
            return
        self._push(bound_s, Item("tight", place, None, item.arm, item.step, item.pieces))

    def _go_on(self, bound_s: float, place: Place, item: Item, tried: Tried) -> None:
        self._doubts[place.choice].append(item.arm)
        super()._go_on(bound_s, place, item, tried)


def _cut(lean: Arm, cut: Arm | None) -> Arm:
    """The leanest arm of a family with its pieces, where it has any."""
    return Arm((*lean.parts, *(cut.parts if cut else ())))


def leaner(choice: Choice) -> Choice | None:
    """The same layout with micro-batch 1, where it has no more bytes in any plan: both have as many
    passes in flight, and gradients of several micro-batches to add up."""
    lay = choice.layout
    if lay.micro_batch == 1 or lay.num_micro_batches <= lay.pp:
        return None
    return replace(choice, layout=replace(lay, micro_batch=1))
