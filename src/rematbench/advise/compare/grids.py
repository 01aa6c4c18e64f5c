"""The best settings of the methods' grids, if the defaults do not fit or are slower.

Grids declare their values, so all variants are known, and most need no evaluation.  Two assumptions
(which a test checks against full lists) decide: adding a method never makes a plan faster, and
pieces only cost time and only free bytes.  So neither a method nor pieces are added to a plan that
is slower than a plan that fits.  A composition may be faster than its later methods alone, because
a method need not copy the tensors that an earlier one rebuilds."""

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from rematbench.advise.candidates.candidate import Variant, of_pieces
from rematbench.advise.compare.compositions import (
    UNPLANNED_BYTES,
    Contender,
    Pair,
    composed,
    compositions,
)
from rematbench.evaluate.evaluator import same_plan
from rematbench.evaluate.result import PlannedJob, Result
from rematbench.plugins.kinds import KINDS, changed_kinds, place
from rematbench.plugins.registry import MethodEntry, Registry, method_text
from rematbench.problem import Problem
from rematbench.solve.kept import resident_bytes

Evaluate = Callable[[Sequence[Contender]], list[Pair]]
"""Evaluates candidates and returns pairs in the order of the candidates."""
Bounded = tuple[Contender, float]
"""A candidate and a lower bound of its step in seconds."""
BATCH = 4
"""The number of candidates that are evaluated before the fastest step is updated.  It is constant,
so that the set of evaluated candidates does not depend on the number of processes."""
MOST_SHARE = 0.995
"""A variant is evaluated only if its step may be at most this share of the fastest step, because no
comparison can tell plans apart that differ by less than half a per cent."""
PIECES = KINDS.index("pieces")


def best_variants(
    job: PlannedJob, registry: Registry, most: int, defaults: Sequence[Pair], evaluate: Evaluate
) -> list[Pair]:
    """For each combination of methods, the fastest variant that beats the defaults.

    A variant must fit and leave the reserve free; if none of a combination does, any variant that
    fits is accepted.  If nothing fits at all, the result is the variant with the fewest missing
    bytes.  `defaults`: methods, policies and compositions at their default settings.  At most
    `most` methods are composed.
    """
    grids = _Grids(job, registry, defaults, evaluate)
    grids.evaluate_whole(most - 1)
    grids.evaluate_in_pieces()
    variants = [pair for pair in grids.pairs if pair[0].origin == "grid"]
    fastest: dict[str, Pair] = {}
    fitting = [pair for pair in (*defaults, *variants) if pair[1].fits]
    for pair in sorted(
        fitting, key=lambda item: (not grids.leaves_reserve(item[1]), _step_s(item[1]))
    ):
        fastest.setdefault(pair[1].family, pair)
    best = [pair for pair in fastest.values() if pair[0].origin == "grid"]
    if variants and not fastest:
        fewest = min(variants, key=lambda pair: _missing_bytes(pair[1]))
        missing = min((_missing_bytes(result) for _, result in defaults), default=UNPLANNED_BYTES)
        best = [fewest] if _missing_bytes(fewest[1]) < missing else []
    return [
        (replace(candidate, origin="variant"), replace(result, origin="variant"))
        for candidate, result in best
    ]


def _step_s(result: Result) -> float:
    return float("inf") if result.step_s is None else result.step_s


def _missing_bytes(result: Result) -> int:
    if result.verdict is None:
        return UNPLANNED_BYTES
    return -min(result.verdict.headroom_bytes, result.verdict.host_headroom_bytes)


class _Grids:
    """The variants of one job, and the defaults from which they are composed.  A variant is
    evaluated only if its step may be shorter than `limit_s`."""

    def __init__(
        self, job: PlannedJob, registry: Registry, defaults: Sequence[Pair], evaluate: Evaluate
    ) -> None:
        self.job, self.registry, self.evaluate = job, registry, evaluate
        self.pairs: list[Pair] = []
        self.limit_s = float("inf")
        self._lower_limit(defaults)
        self.defaults = {pair[1].method: pair for pair in defaults if pair[1].plan is not None}
        methods = [pair for pair in self.defaults.values() if pair[0].origin == "method"]
        self.shortest_s = min((_step_s(result) for _, result in methods), default=0.0)
        places = {
            candidate.name: place(kinds)
            for candidate, result in methods
            if result.plan and (kinds := changed_kinds(job.base, result.plan))
        }
        self.whole = [name for name, where in places.items() if where != PIECES]
        self.in_pieces = [name for name, where in places.items() if where == PIECES]

    def evaluate_whole(self, most: int) -> None:
        """Evaluate the methods' grids, alone and composed, without pieces."""
        values = (
            _single(Variant(name, method_text(self.registry.methods[name], settings)))
            for name in self.whole
            for settings in self.registry.methods[name].grid
        )
        self._evaluate((item, self.shortest_s) for item in values if item.name not in self.defaults)
        alone = [self.defaults[name] for name in self.whole]
        singles = [(item, result.plan) for item, result in (*alone, *self.pairs) if result.plan]
        self.pairs += alone
        for count in range(2, most + 1):
            groups = compositions(self.job.base, singles, count)
            bounded = [self._on_base(group) for group in groups if len(group) == count]
            self._evaluate(item for item in bounded if item is not None)

    def evaluate_in_pieces(self) -> None:
        """Evaluate plans that lack device bytes in pieces, with the first value of each grid of
        pieces that fits.  A plan qualifies if it may be faster than the plans that fit and does not
        keep more than the device has.  The fastest plan comes first."""
        problem, short = self.job.problem, dict[bytes, Pair]()
        for pair in self.pairs:
            result = pair[1]
            if self.leaves_reserve(result) or _step_s(result) >= self.limit_s:
                continue
            if result.plan and not keeps_too_much(problem, result):
                short.setdefault(same_plan(result.plan), pair)
        pairs = sorted(short.values(), key=lambda pair: (_step_s(pair[1]), pair[1].method))
        for name in self.in_pieces:
            method = self.registry.methods[name]
            if not method.grid:
                continue
            if not (self.limit_s < float("inf") and self._base_keeps_too_much()):
                self._evaluate([(_single(of_pieces(method)), self.shortest_s)])
            self._evaluate((_in_pieces(pair, method), _step_s(pair[1])) for pair in pairs)

    def _base_keeps_too_much(self) -> bool:
        """Whether the base fits in no number of pieces; False if its bytes are not known."""
        base = same_plan(self.job.base)
        results = (result for _, result in self.defaults.values())
        return any(
            keeps_too_much(self.job.problem, result)
            for result in results
            if result.plan and same_plan(result.plan) == base
        )

    def _on_base(self, group: tuple[Contender, ...]) -> Bounded | None:
        """The candidate that applies a group's last method to the plan of the others, with a lower
        bound; None if it is a default or the others have no plan."""
        pairs = {pair[1].method: pair for pair in self.pairs} | self.defaults
        before = pairs.get("+".join(item.name for item in group[:-1]))
        if before is None or before[1].plan is None:
            return None
        candidate = replace(composed(group, before[1].plan), origin="grid")
        return None if candidate.name in self.defaults else (candidate, _step_s(before[1]))

    def _evaluate(self, bounded: Iterable[Bounded]) -> None:
        """Evaluate the candidates that may be fast enough, batch by batch."""
        waiting = list(bounded)
        while waiting:
            batch = [item for item, bound_s in waiting[:BATCH] if bound_s < self.limit_s]
            waiting = waiting[BATCH:]
            pairs = [
                (candidate.named(result.method), result)
                for candidate, result in self.evaluate(batch)
                if result.plan is not None
            ]
            self._lower_limit(pairs)
            self.pairs += pairs

    def leaves_reserve(self, result: Result) -> bool:
        """Whether the plan leaves the reserve of device bytes free."""
        reserve_bytes, verdict = self.job.problem.reserve_bytes, result.verdict
        return verdict is not None and verdict.headroom_bytes >= reserve_bytes

    def _lower_limit(self, pairs: Iterable[Pair]) -> None:
        fitting = [result for _, result in pairs if result.fits and self.leaves_reserve(result)]
        self.limit_s = min([self.limit_s, *(MOST_SHARE * _step_s(item) for item in fitting)])


def keeps_too_much(problem: Problem, result: Result) -> bool:
    """Whether states and kept tensors, which pieces do not change, exceed the device's memory."""
    assert result.plan is not None
    assert result.evaluation is not None
    kept = resident_bytes(problem, result.plan)
    ranks = result.evaluation.ranks
    states = [rank.parameter + rank.gradient + rank.optimizer for rank in ranks]
    return any(a + b > problem.usable_bytes for a, b in zip(kept, states, strict=True))


def _single(variant: Variant) -> Contender:
    return Contender((variant,), origin="grid")


def _in_pieces(pair: Pair, method: MethodEntry) -> Contender:
    """The candidate that computes a result's plan in the fewest pieces that fit."""
    candidate, result = pair
    parts = (Variant(candidate.family, result.method), of_pieces(method))
    return Contender(parts, origin="grid", base=result.plan)
