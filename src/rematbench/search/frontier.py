"""Best first: bounds are tightened, and plans simulated, in the order of their bounds."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace as replaced
from itertools import count
from time import monotonic

from msgspec import Struct
from msgspec.structs import replace

from rematbench.choose.outcome import Verdict, judge, make_problem, reserved_bytes
from rematbench.lowering.lower import lower
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import MethodError, Registry
from rematbench.problem import Problem
from rematbench.search.arms import KEEP, Arm, Tree
from rematbench.search.probe import Refused
from rematbench.search.shard import Shard
from rematbench.search.skeleton import Frame, frame, tightened
from rematbench.search.space import Choice
from rematbench.simulate.evaluate import PlanEvaluation, evaluate_program, program_bytes
from rematbench.spec.layout import LayoutError

SHARD, EXPAND, MORE, CLOSED, TIGHT = range(5)
"""What an entry of the queue waits for: its shard's facts, what is added to an arm that does not
fit, the bound by the schedule, the simulation."""


class Tried(Struct, frozen=True, kw_only=True):
    """One simulated plan.  `problem` and `base` are those of its layout; without an evaluation it
    does not fit, or has no plan, and `reason` says why."""

    choice: Choice
    method: str
    bound_s: float
    problem: Problem
    base: Plan
    reason: str = ""
    plan: Plan | None = None
    evaluation: PlanEvaluation | None = None
    verdict: Verdict | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the step; infinite where it does not fit."""
        return self.evaluation.step_s if self.evaluation else float("inf")


class Place(Struct):
    """A layout while it is searched: its shard, its place there, and the arms that fit."""

    shard: Shard
    index: int
    choice: Choice
    fits: list[Arm]
    families: list[tuple[Arm, Arm | None]] | None = None
    problem: Problem | None = None
    frame: Frame | None = None


class Item(Struct, frozen=True):
    """An entry of the queue."""

    stage: int
    place: Place | None
    shard: Shard | None
    arm: Arm
    step: int = 1
    pieces: int = 1


class Search:
    """One search under way.  `fell`: candidates by what excluded them."""

    def __init__(
        self, shards: list[Shard], tree: Tree, registry: Registry, within: float, shown: int = 10
    ) -> None:
        self.tree, self.registry, self.within, self.shown = tree, registry, within, shown
        self.queue: list[tuple[float, int, Item]] = []
        self.order = count()
        self.tried: list[Tried] = []
        self.best_s = float("inf")
        self.fell: Counter[str] = Counter()
        for shard in shards:
            held = shard.holds_states()
            self.fell["states alone do not fit"] += int((~held).sum())
            if held.any():
                self._push(float(shard.kernels_s[held].min()), Item(SHARD, None, shard, KEEP))

    @property
    def bound_s(self) -> float:
        """No plan that is left is faster."""
        return self.queue[0][0] if self.queue else self.best_s

    @property
    def gap(self) -> float:
        """How much faster a plan may be, as a share of the best step."""
        if self.best_s == float("inf"):
            return float("inf")
        return max(0.0, 1.0 - self.bound_s / self.best_s)

    def run(self) -> Iterator[Tried | None]:
        """Work until the gap is closed: each simulated plan, and None now and then between."""
        while self.queue and self.gap > self.within:
            bound_s, _, item = heapq.heappop(self.queue)
            yield self._take(bound_s, item)

    def _push(self, bound_s: float, item: Item) -> None:
        if bound_s < self.best_s:
            heapq.heappush(self.queue, (bound_s, next(self.order), item))

    def _take(self, bound_s: float, item: Item) -> Tried | None:
        place = item.place
        if place is None:
            assert item.shard is not None
            self._open(bound_s, item.shard)
        elif self._dominated(place, item.arm):
            self.fell["made of a plan that fits"] += 1
        elif item.stage == EXPAND:
            self._expand(bound_s, place, item.arm)
        elif item.stage == MORE:
            self._judge(bound_s, place, item.arm, item.pieces)
        elif item.stage == CLOSED:
            self._tighten(bound_s, place, item)
        else:
            return self._simulate(bound_s, place, item)
        return None

    def _open(self, bound_s: float, shard: Shard) -> None:
        """Queue the layouts of a shard whose states fit, keeping everything at first."""
        for index in shard.holds_states().nonzero()[0]:
            self._judge(bound_s, Place(shard, int(index), shard.choices[index], []), KEEP)

    def _judge(self, bound_s: float, place: Place, arm: Arm, pieces: int = 1) -> None:
        """Queue an arm at a layout, at the least step of its line whose bytes may fit; or what is
        made of it, where none may."""
        shard, at = place.shard, place.index
        values = arm.pieces.scalar.values if arm.pieces and arm.pieces.scalar else ("",)
        found = self._least(place, arm, pieces, bound_s)
        if found:
            bound, step = found
            self._push(bound, Item(CLOSED, place, None, arm, step, pieces))
        elif pieces == 2 and shard.in_most_pieces(arm)[at] > shard.usable_bytes:
            self.fell["device memory, in any pieces"] += 1
        elif pieces < len(values):
            self._judge(bound_s, place, arm, pieces + 1)
            return
        if pieces < len(values) and arm.line and found and found[1] > 1:
            self._push(bound_s, Item(MORE, place, None, arm, 1, pieces + 1))
        if not found and not arm.pieces:
            first = shard.bounds(arm)
            if not isinstance(first, Refused):
                self._push(max(bound_s, float(first.step_s[at])), Item(EXPAND, place, None, arm))

    def _least(
        self, place: Place, arm: Arm, pieces: int, bound_s: float
    ) -> tuple[float, int] | None:
        """The bound and the least step whose bytes may fit."""
        shard, at = place.shard, place.index
        for step in range(1, shard.steps(arm) + 1):
            found = shard.bounds(arm, step, pieces)
            if isinstance(found, Refused):
                self.fell[f"{arm.text(1)}: {found.reason}"] += 1
                return None
            if found.host_bytes[at] > shard.problem.cost.host_room_bytes:
                self.fell["host memory, by its bound"] += 1
                return None  # no larger share needs less of it
            if found.peak_bytes[at] <= shard.usable_bytes:
                return max(bound_s, float(found.step_s[at])), step
            self.fell["device memory, by its bound"] += 1
        return None

    def _dominated(self, place: Place, arm: Arm) -> bool:
        """Whether an arm contains one that fits: it is not faster."""
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
                self._push(bound_s, Item(EXPAND, place, None, more))

    def _may_fit(self, place: Place, lean: Arm, pieces: Arm | None) -> bool:
        shard, at = place.shard, place.index
        if shard.least_bytes(pieces)[at] > shard.usable_bytes:
            return False
        return bool(shard.family_bytes(lean, pieces)[at] <= shard.usable_bytes)

    def _tighten(self, bound_s: float, place: Place, item: Item) -> None:
        if place.problem is None:
            spec = place.shard.problem
            place.problem = replaced(spec, layout=place.choice.layout, _memo={}, _weights={})
        if place.frame is None:
            place.frame = frame(place.problem, place.choice.base(place.problem.base_plan))
        facts, moves = place.shard.facts(item.arm, item.step, item.pieces, place.index)
        cost = place.problem.cost
        rate = cost.cluster.hbm_bytes_per_s * cost.gpu.hbm_efficiency
        tight = tightened(place.frame, facts, moves, place.choice.sizes, rate)
        self._push(
            max(bound_s, tight), Item(TIGHT, place, None, item.arm, item.step, item.pieces)
        )

    def _simulate(self, bound_s: float, place: Place, item: Item) -> Tried | None:
        method = item.arm.text(item.step, item.pieces)
        tried = tried_plan(place, method, bound_s, self.registry)
        self.tried.append(tried)
        if tried.evaluation is not None:
            place.fits.append(item.arm)
            self.best_s = min(self.best_s, tried.step_s)
            return tried
        self.fell[tried.reason.split(":")[0]] += 1
        pieces = item.arm.pieces.scalar if item.arm.pieces else None
        if item.step < place.shard.steps(item.arm):
            self._push(bound_s, Item(CLOSED, place, None, item.arm, item.step + 1, item.pieces))
        elif pieces and item.pieces < len(pieces.values):
            self._push(bound_s, Item(MORE, place, None, item.arm, 1, item.pieces + 1))
        else:
            self._push(bound_s, Item(EXPAND, place, None, item.arm))
        return tried

    def found(self) -> list[Tried]:
        """The fastest that fit, one line for each."""
        return sorted((t for t in self.tried if t.evaluation), key=lambda t: t.step_s)[: self.shown]


def tried_plan(place: Place, method: str, bound_s: float, registry: Registry) -> Tried:
    """Plan, lower and weigh a candidate; if its bytes fit, its time."""
    problem = place.problem
    assert problem is not None
    base = place.choice.base(problem.base_plan)
    tried = Tried(choice=place.choice, method=method, bound_s=bound_s, problem=problem, base=base)
    try:
        plan = registry.resolve(method, None, problem).plan(problem, base)
        if isinstance(plan, Unsupported):
            return replace(tried, reason=f"no plan: {plan.reason}")
        program = lower(plan, problem)
    except (PlanError, LayoutError, MethodError) as error:
        return replace(tried, reason=f"no plan: {error}")
    ranks = program_bytes(problem, plan, program)
    room = problem.usable_bytes - problem.reserve_bytes
    if max(rank.device_peak for rank in ranks) > room:
        return replace(tried, reason="device memory: its live bytes")
    reserved = reserved_bytes(problem, program, ranks)
    if reserved > room:
        return replace(tried, reason="device memory: what its allocator reserves")
    evaluation = evaluate_program(problem, plan, program, ranks=ranks)
    evaluation = replace(evaluation, reserved_bytes=reserved)
    verdict = judge(problem, evaluation)
    if not verdict.fits:
        return replace(tried, reason=verdict.binds)
    if evaluation.not_timed:
        return replace(tried, reason=evaluation.not_timed)
    return replace(tried, plan=plan, evaluation=evaluation, verdict=verdict)


__all__ = ["Callable", "Search", "Tried", "make_problem", "monotonic"]
