"""Plan families: the candidates of a search, and the methods that it can add to each.

Compositions follow the rule of `compare`: methods with different places compose in the order of the
places.  Adding a method never makes a plan faster, so the search adds none to a plan that fits.
Methods that move passes are an exception: the search starts with them, as it starts with the plan
that keeps everything."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod

from rematbench.advise.bounds.lines import Probe
from rematbench.advise.candidates.candidate import KEEP, Candidate, Variant
from rematbench.plugins.kinds import KINDS, ChangeKind, place


class PlanFamily:
    """Candidates and the methods that can be added to each, by the kinds of change of the variants.

    The *lean* candidate of a candidate has the last setting of the grid for each offloading method,
    and the rebuilding method that keeps the fewest bytes for each rebuilding method.  A *family* is
    the set of candidates with the same lean candidate.  `keeping`: whether the candidate that keeps
    every activation is included.

    A rebuilding method is a *spare* of another one that is at least as fast and keeps no more bytes
    on every sample.  A spare is tried only if the other method fails because of reserved bytes,
    which do not follow the order of kept bytes.  With `exact` no method is a spare.
    """

    roots: tuple[Candidate, ...]
    """The candidates that a search begins with on every layout."""
    firsts: tuple[Candidate, ...]
    """The candidates that keep everything, with the passes of the layout or of a method that moves
    passes; no plan is faster than the fastest of them."""

    def __init__(
        self,
        samples: Sequence[dict[Variant, Probe]],
        most: int,
        *,
        keeping: bool = True,
        exact: bool = False,
    ) -> None:
        results = {variant: probe for variant, probe in samples[0].items() if probe.kinds}
        self.places = {variant: place(probe.kinds) for variant, probe in results.items()}
        self.spares = {} if exact else _spares(samples)
        idle = {spare for spares in self.spares.values() for spare in spares}
        self.added = [variant for variant in self.places if variant not in idle]
        self.most = most
        self._ends: dict[Candidate, bool] = {}
        self._ends_next: dict[Candidate, bool] = {}
        self.firsts = (KEEP, *(Candidate((v,)) for v in results if v.moves))
        every = tuple(Candidate((variant,)) for variant in self.added)
        self.roots = self.firsts if keeping else every
        rebuild = [s for s in self._of("rebuild") if s.scalar is None and s in self.added]
        leanest = min(
            rebuild, key=lambda s: results[s].nbytes.middle.slope.kept_bytes, default=None
        )
        offload = {variant.method: variant for variant in self._of("offload")}
        self.stands_for = {
            variant: leanest
            if variant in self._of("rebuild")
            else offload.get(variant.method, variant)
            for variant in self.places
        }

    def _of(self, kind: ChangeKind) -> list[Variant]:
        where = KINDS.index(kind)
        return [variant for variant, place in self.places.items() if place == where]

    def more(self, candidate: Candidate) -> list[Candidate]:
        """The candidates with one more method, whose place is after those of `candidate`'s methods;
        none for a candidate with a spare."""
        last = max((self.places[part] for part in candidate.parts), default=-1)
        composes = all(part.composes and part in self.added for part in candidate.parts)
        if len(candidate.parts) == self.most or not composes:
            return []
        return [
            Candidate((*candidate.parts, variant))
            for variant in self.added
            if self.places[variant] > last
            and not variant.moves
            and (variant.composes or not candidate.parts)
            and not (candidate.share and Candidate((variant,)).share)
        ]

    def instead(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidates in which a spare replaces one of `candidate`'s methods."""
        for at, part in enumerate(candidate.parts):
            for spare in self.spares.get(part, ()):
                yield Candidate((*candidate.parts[:at], spare, *candidate.parts[at + 1 :]))

    def ends(self, candidate: Candidate) -> bool:
        """Whether the family adds no method to a candidate."""
        if candidate not in self._ends:
            self._ends[candidate] = not self.more(candidate)
        return self._ends[candidate]

    def ends_next(self, candidate: Candidate) -> bool:
        """Whether the family adds no further method after adding one to a candidate."""
        if candidate not in self._ends_next:
            self._ends_next[candidate] = self.ends(candidate) or all(
                map(self.ends, self.more(candidate))
            )
        return self._ends_next[candidate]

    def plans(self, layers: int) -> int:
        """The number of plans at a layout whose longest chunk has `layers` layers, over all
        candidates and all steps of their scalars."""
        return sum(
            prod(part.scalar.count(layers) for part in candidate.parts if part.scalar)
            for candidate in self.candidates
        )

    @property
    def candidates(self) -> list[Candidate]:
        """The roots, and all candidates that add methods to them."""
        result = list(self.roots)
        for candidate in result:
            result += self.more(candidate)
        return result

    @cached_property
    def leanest(self) -> list[Candidate]:
        results: dict[Candidate, None] = {}
        waiting = [*self.firsts]
        while waiting:
            for more in self.more(waiting.pop()):
                lean = Candidate(tuple(self.stands_for[part] or part for part in more.parts))
                if lean not in results:
                    results[lean] = None
                    waiting.append(lean)
        return list(results)


class FixedFamily(PlanFamily):
    """The family of a search for the best layout of fixed candidates.  It adds no methods.  A
    candidate with a share has a second root at the share 0, which lies before the share's first
    step."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.places, self.stands_for, self.most, self.firsts = {}, {}, 0, (KEEP,)
        self._ends, self._ends_next = {}, {}
        self.added, self.spares = [], {}
        self.roots = (
            *candidates,
            *(_at_zero(candidate) for candidate in candidates if candidate.share),
        )

    def more(self, candidate: Candidate) -> list[Candidate]:
        """No candidates, because the family is fixed."""
        return []


def _at_zero(candidate: Candidate) -> Candidate:
    flat = (Variant(p.method, p.at(0)) if p is candidate.share else p for p in candidate.parts)
    return Candidate(tuple(flat))


def _spares(samples: Sequence[dict[Variant, Probe]]) -> dict[Variant, list[Variant]]:
    """The spares of each method, as in PlanFamily; of equal methods the first is no spare."""
    better = {
        variant: [
            other
            for other in samples[0]
            if other != variant and all(_no_better(variant, other, sample) for sample in samples)
        ]
        for variant in samples[0]
    }
    results: dict[Variant, list[Variant]] = {}
    for variant, others in better.items():
        first = next((other for other in others if not better[other]), None)
        if first is not None:
            results.setdefault(first, []).append(variant)
    return results


def rebuilds(variant: Variant, probe: Probe) -> bool:
    """Whether a method only rebuilds activations and has no scalar."""
    return variant.scalar is None and probe.kinds == {"rebuild"}


def _no_better(variant: Variant, other: Variant, sample: dict[Variant, Probe]) -> bool:
    if not all(item in sample and rebuilds(item, sample[item]) for item in (variant, other)):
        return False
    mine, its = _numbers(sample[variant]), _numbers(sample[other])
    earlier = list(sample).index(other) < list(sample).index(variant)
    return all(b <= a for a, b in zip(mine, its, strict=True)) and (mine != its or earlier)


def _numbers(probe: Probe) -> list[float]:
    """A probe's seconds and bytes, rounded to nine digits because slopes are differences of
    sums."""
    return [
        float(f"{number:.9g}")
        for line in probe.facts
        for cost in (line.base, line.slope)
        for number in (
            cost.forward.compute_s,
            cost.backward.compute_s,
            cost.backward.host_s,
            cost.kept_bytes,
            cost.backward.high_bytes if cost is line.base else 0.0,
        )
    ]
