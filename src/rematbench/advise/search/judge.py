"""Which plans of an arm may fit a layout, by their bytes."""

from abc import ABC, abstractmethod
from collections import Counter
from functools import partial
from math import inf

import numpy as np

from rematbench.advise.search.arms import Arm
from rematbench.advise.search.bounds import Bounds
from rematbench.advise.search.place import Fallen, Item, Place, in_one_piece, most_pieces
from rematbench.advise.search.probe import Refused
from rematbench.advise.search.tree import Tree

COPIED, KEPT = "host memory, by what is copied", "device memory, by what is kept"
"""Why an arm falls that is not probed."""


class Judge(ABC):
    """What falls to memory, and what of an arm is left.  `fell`: excluded plans and layouts by
    reason; `plans_short_bytes`, `host_short_bytes`: the least device bytes, and host bytes of a
    node, that an excluded plan lacked; `refusal`: the last reason why a method has no plan."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.plans_short_bytes = self.host_short_bytes = inf
        self.refusal = ""
        self.fell: Counter[str] = Counter()
        self._fallen: list[Fallen] = []

    @abstractmethod
    def _push(self, bound_s: float, item: Item) -> None:
        """Queue the next work on an arm."""

    def _judge(self, bound_s: float, place: Place, arm: Arm, pieces: int = 1) -> None:
        """Queue an arm at a layout, at the least step of its line whose bytes may fit; where no
        step may fit, queue the expansion of the arm, and that of an arm with a line in any case:
        with one more method a smaller share may do.  An arm in a number of pieces is judged once:
        judging fewer pieces, and a plan of fewer pieces that does not fit, both ask for more, but
        where host memory is short, which pieces do not change."""
        if (arm, pieces) in place.judged:
            return
        place.judged.add((arm, pieces))
        if arm.pieces and place.ends.get(in_one_piece(arm)) == 1:
            self.fell["host memory, in any pieces"] += 1
            return
        if pieces == 1 and self.tree.ends_next(arm) and self._falls(place, arm):
            for more in self.tree.more(arm):
                self._push(bound_s, Item("made", place, None, more))
            return
        shard, at = place.shard, place.index
        found = self._least(place, arm, pieces, bound_s)
        if found:
            self._push(found[0], Item("closed", place, None, arm, found[1], pieces))
        if arm.pieces is None:
            grows = (arm.line or not found) and not self.tree.ends(arm)
            known = shard.bounds(arm) if grows else None
            if isinstance(known, Bounds):
                bound = max(bound_s, float(known.step_s[0, at]))
                self._push(bound, Item("grow" if arm.line else "expand", place, None, arm))
            return
        if pieces < most_pieces(arm) and (not found or found[1] > 1):
            self._ask_pieces(place, arm, pieces, bound_s, found[1] if found else inf)

    def _falls(self, place: Place, arm: Arm) -> bool:
        """Whether an arm does not fit by what it keeps and copies.  It is not probed, unless
        nothing fits and what it lacks may be the least."""
        short = place.shard.least.short(arm)
        found = short.falls[place.index] if short is not None else None
        if found is None:
            return False
        nbytes, host = found
        self.fell[COPIED if host else KEPT] += 1
        self._fallen.append(Fallen(nbytes, host, place, arm))
        return True

    def _measure_shortage(self) -> None:
        """Probe the arms that fell unprobed, as long as what they lack may be the least."""
        for fallen in sorted(self._fallen, key=lambda one: (one.host, one.nbytes)):
            least = self.host_short_bytes if fallen.host else self.plans_short_bytes
            if fallen.nbytes < least and not (fallen.host and self.plans_short_bytes < inf):
                self._least(fallen.place, fallen.arm, 1, 0.0)
        self._fallen.clear()

    def _ask_pieces(
        self, place: Place, arm: Arm, pieces: int, bound_s: float, below: float
    ) -> None:
        """Queue an arm in the fewest pieces (more than `pieces`) in which its bytes may fit at a
        step less than `below`.  Pieces change neither the kept bytes nor the host bytes."""
        shard, at = place.shard, place.index
        known = shard.bounds(arm, pieces)
        if isinstance(known, Refused):
            self._push(bound_s, Item("pieces", place, None, arm, 1, pieces + 1))
            return
        fewer = max((had for one, had in place.judged if one == arm and had < pieces), default=0)
        over = known.host_bytes[:, at] > shard.problem.cost.host_room_bytes
        for more in range(pieces + 1, most_pieces(arm) + 1):
            high = over
            if fewer:
                peak_bytes = shard.in_more_pieces(arm, fewer, pieces, more)[:, at]
                high = over | (peak_bytes > shard.usable_bytes[at])
            step = int(np.argmin(high))
            if not high[step] and step + 1 < below:
                bound_s = max(bound_s, float(known.step_s[step, at]))
                self._push(bound_s, Item("pieces", place, None, arm, 1, more))
                return
        self.fell["memory, in any pieces"] += 1

    def _least(
        self, place: Place, arm: Arm, pieces: int, bound_s: float, after: int = 0
    ) -> tuple[float, int] | None:
        """(bound in seconds, step) of the least step of an arm's line after `after` whose bytes may
        fit; None without such a step."""
        shard, at = place.shard, place.index
        found = shard.bounds(arm, pieces)
        if isinstance(found, Refused):
            self.fell["no plan"] += 1
            self.refusal = found.reason
            return None
        over = found.peak_bytes[:, at] - shard.usable_bytes[at]
        last = min(len(over), place.ends.get(in_one_piece(arm), len(over) + 1) - 1)
        for step in range(after + 1, last + 1):
            host_over = found.host_bytes[step - 1, at] - shard.problem.cost.host_room_bytes
            if host_over > 0:
                self.host_short_bytes = min(self.host_short_bytes, float(host_over))
                self.fell["host memory, by its bound"] += 1
                return None  # no larger step of the line needs less host memory
            if over[step - 1] > 0:
                self._short(float(over[step - 1]))
                self.fell["device memory, by its bound"] += 1
            elif (arm, step) in place.flat:
                self.fell["memory, in any pieces"] += 1
            else:
                return max(bound_s, float(found.step_s[step - 1, at])), step
        return None

    def _may_fit(self, place: Place, lean: Arm, pieces: Arm | None) -> bool:
        if (lean, pieces) not in place.families:
            place.families[lean, pieces] = self._holds(place, lean, pieces)
        return place.families[lean, pieces]

    def _holds(self, place: Place, lean: Arm, pieces: Arm | None) -> bool:
        shard = place.shard
        for bytes_of in (shard.least.of_all, partial(shard.least.of_family, lean)):
            over = float((bytes_of(pieces) - shard.usable_bytes)[place.index])
            if over > 0:
                self._short(over)
                return False
        return True

    def _short(self, nbytes: float) -> None:
        self.plans_short_bytes = min(self.plans_short_bytes, nbytes)
