"""Best first: bounds are tightened, and plans simulated, in the order of their bounds."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace as replaced
from itertools import count
from typing import Literal

from msgspec import Struct

from rematbench.plugins.registry import Registry
from rematbench.problem import Problem
from rematbench.search.arms import KEEP, Arm, Tree
from rematbench.search.probe import Refused
from rematbench.search.shard import Shard
from rematbench.search.skeleton import Frame, frame
from rematbench.search.space import Choice
from rematbench.search.trial import Tried, tried_plan

SHOWN = 1.1
"""What may be slower than the best by no more than this is simulated to be shown beside it."""

Stage = Literal["shard", "expand", "pieces", "closed", "tight"]
"""What an entry of the queue waits for: its shard's facts; what is added to an arm that does not
fit; the next number of pieces; the bound by the schedule; the simulation."""


class Place(Struct):
    """A layout while it is searched: its shard, its place there, the arms that fit, and the
    families that may."""

    shard: Shard
    index: int
    choice: Choice
    fits: list[Arm]
    families: list[tuple[Arm, Arm | None]] | None = None
    problem: Problem | None = None
    frame: Frame | None = None


class Item(Struct, frozen=True):
    """An entry of the queue."""

    stage: Stage
    place: Place | None
    shard: Shard | None
    arm: Arm
    step: int = 1
    pieces: int = 1


class Search:
    """One search under way.  `fell`: plans and layouts by what excluded them; `short_bytes`: the
    least that any plan was short of on a device."""

    def __init__(
        self, shards: list[Shard], tree: Tree, registry: Registry, engine: str = ""
    ) -> None:
        self.tree, self.registry, self.engine = tree, registry, engine
        self.queue: list[tuple[float, int, Item]] = []
        self.order = count()
        self.tried: list[Tried] = []
        self.best_s = float("inf")
        self.short_bytes = float("inf")
        self.fell: Counter[str] = Counter()
        for shard in shards:
            held = shard.holds_states()
            self.fell["layouts whose states alone do not fit"] += int((~held).sum())
            if held.any():
                self._push(float(shard.kernels_s[held].min()), Item("shard", None, shard, KEEP))
            else:
                self._short(float(shard.least_state_bytes() - shard.usable_bytes))

    @property
    def bound_s(self) -> float:
        """No plan that is left is faster."""
        return self.queue[0][0] if self.queue else float("inf")

    @property
    def gap(self) -> float:
        """How much faster a plan may be, as a share of the best step."""
        if self.best_s == float("inf"):
            return float("inf") if self.queue else 0.0
        return max(0.0, 1.0 - self.bound_s / self.best_s)

    def run(self) -> Iterator[Tried | None]:
        """Work for as long as anything is left: after each entry of the queue what it simulated, or
        None."""
        while self.queue:
            bound_s, _, item = heapq.heappop(self.queue)
            yield self._take(bound_s, item)

    def beat(self, step_s: float) -> None:
        """A step that fits, found elsewhere."""
        self.best_s = min(self.best_s, step_s)

    def _push(self, bound_s: float, item: Item) -> None:
        if bound_s < SHOWN * self.best_s:
            heapq.heappush(self.queue, (bound_s, next(self.order), item))

    def _short(self, nbytes: float) -> None:
        self.short_bytes = min(self.short_bytes, nbytes)

    def _take(self, bound_s: float, item: Item) -> Tried | None:
        place = item.place
        if place is None:
            assert item.shard is not None
            self._open(bound_s, item.shard)
        elif self._dominated(place, item.arm):
            self.fell["made of a plan that fits"] += 1
        elif item.stage == "expand":
            self._expand(bound_s, place, item.arm)
        elif item.stage == "pieces":
            self._judge(bound_s, place, item.arm, item.pieces)
        elif item.stage == "closed":
            self._tighten(bound_s, place, item)
        else:
            return self._simulate(bound_s, place, item)
        return None

    def _open(self, bound_s: float, shard: Shard) -> None:
        """Queue the layouts of a shard whose states fit, keeping everything at first."""
        for index in shard.holds_states().nonzero()[0]:
            at = int(index)
            self._judge(bound_s, Place(shard, at, shard.choices[at], []), KEEP)

    def _judge(self, bound_s: float, place: Place, arm: Arm, pieces: int = 1) -> None:
        """Queue an arm at a layout, at the least step of its line whose bytes may fit; or what is
        made of it, where none may."""
        shard, at = place.shard, place.index
        found = self._least(place, arm, pieces, bound_s)
        if found:
            self._push(found[0], Item("closed", place, None, arm, found[1], pieces))
        if arm.pieces is None:
            if not found and not isinstance(first := shard.bounds(arm), Refused):
                bound = max(bound_s, float(first.step_s[at]))
                self._push(bound, Item("expand", place, None, arm))
            return
        smaller = arm.line and found and found[1] > 1  # more pieces may need less of the line
        if pieces == _pieces(arm) or (found and not smaller):
            return
        if pieces > 1 and shard.in_most_pieces(arm)[at] > shard.usable_bytes:
            self.fell["device memory, in any pieces"] += 1
            return
        self._push(found[0] if found else bound_s, Item("pieces", place, None, arm, 1, pieces + 1))

    def _least(
        self, place: Place, arm: Arm, pieces: int, bound_s: float
    ) -> tuple[float, int] | None:
        """The bound and the least step of an arm's line whose bytes may fit."""
        shard, at = place.shard, place.index
        for step in range(1, shard.steps(arm) + 1):
            found = shard.bounds(arm, step, pieces)
            if isinstance(found, Refused):
                self.fell["no plan"] += 1
                return None
            if found.host_bytes[at] > shard.problem.cost.host_room_bytes:
                self.fell["host memory, by its bound"] += 1
                return None  # no larger share needs less of it
            if found.peak_bytes[at] <= shard.usable_bytes:
                return max(bound_s, float(found.step_s[at])), step
            self._short(float(found.peak_bytes[at]) - shard.usable_bytes)
            self.fell["device memory, by its bound"] += 1
        return None

    def _dominated(self, place: Place, arm: Arm) -> bool:
        """Whether an arm contains one that fits: it is not faster.  One with a scalar says nothing:
        with a method more the scalar may be less."""
        return any(set(known.parts) <= set(arm.parts) for known in place.fits)

    def _expand(self, bound_s: float, place: Place, arm: Arm) -> None:
        """Queue what is made of an arm, of families whose leanest arm may fit."""
        if place.families is None:
            place.families = [key for key in self.tree.families if self._may_fit(place, *key)]
        if not place.families:
            self.fell["device memory, under the leanest plans"] += 1
            return
        for more in self.tree.more(arm):
            family = self.tree.family(more)
            if self._dominated(place, more) or not any(
                set(family[0].parts) <= set(lean.parts) and (pieces or not family[1])
                for lean, pieces in place.families
            ):
                continue
            if family in place.families:
                self._judge(bound_s, place, more)
            else:
                self._push(bound_s, Item("expand", place, None, more))

    def _may_fit(self, place: Place, lean: Arm, pieces: Arm | None) -> bool:
        shard, at = place.shard, place.index
        for nbytes in (shard.least_bytes(pieces), shard.family_bytes(lean, pieces)):
            if nbytes[at] > shard.usable_bytes:
                self._short(float(nbytes[at]) - shard.usable_bytes)
                return False
        return True

    def _tighten(self, bound_s: float, place: Place, item: Item) -> None:
        """Queue an arm by its whole schedule."""
        if place.problem is None:
            problem = place.shard.problem
            place.problem = replaced(problem, layout=place.choice.layout, _memo={}, _weights={})
        if place.frame is None:
            place.frame = frame(place.problem, place.choice.base(place.problem.base_plan))
        tight = place.shard.tight_s(item.arm, item.step, item.pieces, place.index, place.frame)
        found = Item("tight", place, None, item.arm, item.step, item.pieces)
        self._push(max(bound_s, tight), found)

    def _simulate(self, bound_s: float, place: Place, item: Item) -> Tried:
        """Try a plan; queue the next step of its scalars, or what is made of it, if it does not
        fit."""
        assert place.problem is not None
        arm = item.arm
        method = arm.text(item.step, item.pieces)
        tried = tried_plan(place.choice, place.problem, method, bound_s, self.registry, self.engine)
        self.tried.append(tried)
        if tried.evaluation is not None:
            if not any(part.scalar for part in arm.parts):
                place.fits.append(arm)
            self.beat(tried.step_s)
            return tried
        self.fell[tried.reason.split(":")[0]] += 1
        self._short(tried.short_bytes)
        if item.step < place.shard.steps(arm):
            self._push(bound_s, Item("closed", place, None, arm, item.step + 1, item.pieces))
        elif item.pieces < _pieces(arm):
            self._push(bound_s, Item("pieces", place, None, arm, 1, item.pieces + 1))
        else:
            self._push(bound_s, Item("expand", place, None, arm))
        return tried


def _pieces(arm: Arm) -> int:
    """Values of an arm's pieces; 1 where it has none."""
    scalar = arm.pieces.scalar if arm.pieces else None
    return len(scalar.values) if scalar else 1
