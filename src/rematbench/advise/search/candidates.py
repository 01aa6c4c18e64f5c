"""The candidates that a search tries on each layout, and the methods that it can add to each.

The rule of compositions is that of `compare`: methods with different places compose in the order of
the places.  A plan is never faster than the plan that its last method was added to, so the search
adds no method to a plan that fits.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Literal

from msgspec import Struct

from rematbench.advise.compare.compositions import (
    KINDS,
    CompareConfig,
    Kind,
    changed_kinds,
    place,
)
from rematbench.advise.search.probes import Probe
from rematbench.plan import Unsupported
from rematbench.plugins.registry import (
    IDENTITY,
    Composition,
    Method,
    MethodEntry,
    MethodError,
    Registry,
    build,
    changed_settings,
    method_text,
)
from rematbench.problem import Problem

Scale = Literal["share", "layers", "pieces"]

LARGEST_UNIT = 8
"""Largest group of layers that a package's policies are searched with: a probe has five groups."""


class Scalar(Struct, frozen=True):
    """A parameter that the search raises until a plan fits.  `share`: a fraction, raised from 0 to
    1 in `steps` steps.  `layers`: a number of a chunk's layers.  Seconds and bytes of a pass are
    linear in both.  `pieces`: the declared `values`; more pieces add seconds and free bytes."""

    scale: Scale
    steps: int = 0
    values: tuple[str, ...] = ()

    def count(self, layers: int) -> int:
        """The number of values, for a chunk of `layers` layers."""
        return {"share": self.steps, "layers": layers, "pieces": len(self.values)}[self.scale]


class Variant(Struct, frozen=True):
    """One method of a candidate.  `text`: the method with its settings; if it has a scalar,
    `text.format` fills in the scalar's value.  `composes`: false for policies (as in `compare`).
    `cuts`: whether the method computes in pieces."""

    method: str
    text: str
    scalar: Scalar | None = None
    composes: bool = True
    cuts: bool = False

    def at(self, step: int) -> str:
        """The method's text at a step of its scalar (from 1 on)."""
        if self.scalar is None:
            return self.text
        match self.scalar.scale:
            case "share":
                return self.text.format(step / self.scalar.steps)
            case "pieces":
                return self.scalar.values[min(step, len(self.scalar.values)) - 1]
        return self.text.format(step)


class Candidate(Struct, frozen=True):
    """Methods in their order of application; a candidate without methods keeps every
    activation.  At most one part has a scalar in which costs are linear: that part is the
    candidate's *share*."""

    parts: tuple[Variant, ...] = ()

    @property
    def share(self) -> Variant | None:
        """The part whose scalar is a share or a number of layers; None without such a part."""
        found = (p for p in self.parts if p.scalar is not None and p.scalar.scale != "pieces")
        return next(found, None)

    @property
    def pieces(self) -> Variant | None:
        """The part that computes in pieces; None without such a part."""
        found = (p for p in self.parts if p.scalar is not None and p.scalar.scale == "pieces")
        return next(found, None)

    def without(self, part: Variant) -> "Candidate":
        """The candidate without `part`."""
        return Candidate(tuple(one for one in self.parts if one != part))

    @property
    def whole(self) -> "Candidate":
        """The candidate without methods that compute in pieces."""
        return Candidate(tuple(part for part in self.parts if not part.cuts))

    @property
    def cutting(self) -> "Candidate":
        """The candidate's methods that compute in pieces, alone."""
        return Candidate(tuple(part for part in self.parts if part.cuts))

    def text(self, step: int = 0, pieces: int = 1) -> str:
        """The candidate's text for `Registry.resolve`, at a step of its share and of its pieces."""
        words = (part.at(pieces if part is self.pieces else step) for part in self.parts)
        return "+".join(words) or IDENTITY


KEEP = Candidate()


def candidates_of(composed: Composition, registry: Registry) -> tuple[Candidate, ...]:
    """Return the candidates of exactly these methods.  If a method's `share` is left open, it
    becomes the method's scalar, with as many steps as the method's `steps`, if declared.  If a
    method would choose a parameter of its grid from the whole layout, each value gives a candidate,
    because a probe of a few layers cannot know the choice."""
    choices = [_settings(method, registry) for method in composed.methods]
    return tuple(Candidate(parts) for parts in product(*filter(None, choices)))


def _settings(method: Method, registry: Registry) -> list[Variant]:
    entry, settings = registry.entry(method.name), changed_settings(method)
    if method.name == IDENTITY:
        return []
    parameter, steps = entry.declared("share", ("", 0))
    if parameter and parameter not in settings:
        steps = int(settings.pop("steps", steps))
        text = method_text(entry, {**settings, parameter: "{}"})
        return [Variant(method.name, text, Scalar("share", steps))]
    if chooses(method, registry):
        return [
            Variant(method.name, method_text(entry, {**settings, **each})) for each in entry.grid
        ]
    return [Variant(method.name, method_text(entry, settings), cuts=_cuts(entry))]


def places_states(registry: Registry, name: str) -> bool:
    """Whether a method, as it is typed, places training states; MethodError if it is composed with
    others."""
    entries = [registry.entry(method.name) for method in registry.resolve(name).methods]
    places = any(entry.moves_states for entry in entries)
    if places and len(entries) > 1:
        raise MethodError(f"{name!r}: name single methods only; search composes them itself")
    return places


def placements(registry: Registry, names: Iterable[str]) -> tuple[str, ...]:
    """The methods of `names` that place training states, each at every value of its grid that the
    name leaves open."""
    return tuple(
        candidate.text()
        for name in names
        if places_states(registry, name)
        for candidate in candidates_of(registry.resolve(name), registry)
    )


def chooses(method: Method, registry: Registry) -> bool:
    """Whether a method chooses grid parameters by itself, from facts that differ between the
    layouts of a shard (pieces follow from the shapes of tensors)."""
    entry = registry.entry(method.name)
    if _cuts(entry):
        return False
    return any(getattr(method, key) is None for each in entry.grid for key in each)


def variants(registry: Registry, config: CompareConfig, only: Sequence[str] = ()) -> list[Variant]:
    """Return every method that is not a planner and moves no states, at its defaults or at each
    setting of its grid, and the policies.  `only`: the names of the methods and policies to take;
    empty for all."""
    found: list[Variant] = []
    for entry in registry.methods.values():
        if entry.planner or entry.moves_states or entry.name == IDENTITY:
            continue
        if only and entry.name not in only:
            continue
        found += _of_method(entry)
    for policy in config.policies:
        if only and policy.method not in only:
            continue
        scalar = Scalar("layers") if policy.smallest == "num_layers" else None
        if policy.smallest and policy.settings.get("method") != "block":
            continue  # a group policy: costs are not linear in the layers of a group
        text = f"{policy.name} {{}}" if scalar else policy.name
        found.append(Variant(policy.method, text, scalar, composes=False))
    tuned = [text for text in only if text not in registry.methods]
    return found + [_tuned(registry, text) for text in tuned]


def _tuned(registry: Registry, text: str) -> Variant:
    """A method with settings that the user typed, or a policy by its name."""
    methods = registry.resolve(text).methods
    if len(methods) > 1:
        raise MethodError(f"{text!r}: name single methods only; search composes them itself")
    cuts = _cuts(registry.entry(methods[0].name))
    return Variant(methods[0].name, text, composes="=" in text, cuts=cuts)


def _of_method(entry: MethodEntry) -> Iterable[Variant]:
    share = entry.declared("share", None)
    if share is not None:
        parameter, steps = share
        return [Variant(entry.name, f"{entry.name}:{parameter}={{}}", Scalar("share", steps))]
    settings = entry.grid or ({},)
    if len(settings) > 1 and _cuts(entry):
        values = tuple(method_text(entry, each) for each in settings)
        return [Variant(entry.name, entry.name, Scalar("pieces", values=values), cuts=True)]
    return [Variant(entry.name, method_text(entry, each), cuts=_cuts(entry)) for each in settings]


def package_variants(
    entry: MethodEntry, problems: Iterable[Problem], only: Sequence[str] = ()
) -> list[Variant]:
    """The policies that a package's options express on any of some problems, each by itself, with
    the fewest settings that make its plan.  Of the policies that differ in a number of layers in
    which costs are linear (`by_layer`), one variant varies that number.  `only`: texts of the
    policies to take; empty, or the package's name, for all."""
    found = dict.fromkeys(text for text in only if text not in (entry.name, IDENTITY))
    seen: dict[str, str] = {}
    for problem in problems if not only or entry.name in only else ():
        for policy in entry.cls.candidates(problem):
            text = _varied(entry, changed_settings(policy))
            if text not in seen and getattr(policy, "unit", 1) <= LARGEST_UNIT:
                needed = _needed(entry, policy, problem)
                if needed is not None:
                    seen[text] = _varied(entry, needed)
    return [
        Variant(text, text, Scalar("layers") if "{}" in text else None, composes=False)
        for text in dict.fromkeys((*found, *seen.values()))
    ]


def _varied(entry: MethodEntry, settings: dict[str, str]) -> str:
    """A policy's text, with an open number of layers if costs are linear in it."""
    parameter, linear = entry.declared("by_layer", ("", {}))
    varies = bool(linear) and linear.items() <= settings.items()
    return method_text(entry, {**settings, parameter: "{}"} if varies else settings)


def _needed(entry: MethodEntry, policy: Method, problem: Problem) -> dict[str, str] | None:
    """The settings of a policy without which it would have another plan; None if there is no plan,
    or if it changes other things than activations: layouts say where states are."""
    base = problem.base_plan
    plan = policy.plan(problem, base)
    if isinstance(plan, Unsupported) or plan.states != base.states:
        return None
    if not {"rebuild", "offload"} & changed_kinds(base, plan):
        return None
    settings = changed_settings(policy)
    for name in tuple(settings):
        fewer = {key: value for key, value in settings.items() if key != name}
        if build(entry, fewer).plan(problem, base) == plan:
            settings = fewer
    return settings


def _cuts(entry: MethodEntry) -> bool:
    return bool(entry.declared("pieces", False))


class Tree:
    """Candidates, and the methods that each candidate can add, by the kinds of change of the
    variants.

    The *lean* candidate of a candidate has the last setting of the grid for each method that
    offloads.  In place of each method that rebuilds, it has the rebuilding method that keeps the
    fewest bytes.  A *family* is the set of candidates with the same lean candidate.  `keeping`:
    whether the candidate that keeps every activation is included.

    A method that rebuilds is a *spare* of another such method that is at least as fast and keeps no
    more bytes on every sample.  A spare is tried only if the allocator alone keeps the other method
    from fitting, because reserved bytes do not follow the order of kept bytes.  With `exact` no
    method is a spare.
    """

    roots: tuple[Candidate, ...]
    """The candidates that a search begins with on every layout."""

    def __init__(
        self,
        samples: Sequence[dict[Variant, Probe]],
        most: int,
        *,
        keeping: bool = True,
        exact: bool = False,
    ) -> None:
        found = {variant: probe for variant, probe in samples[0].items() if probe.kinds}
        self.places = {variant: place(probe.kinds) for variant, probe in found.items()}
        self.spares = {} if exact else _spares(samples)
        idle = {spare for spares in self.spares.values() for spare in spares}
        self.added = [variant for variant in self.places if variant not in idle]
        self.most = most
        self._ends: dict[Candidate, bool] = {}
        self._ends_next: dict[Candidate, bool] = {}
        self.roots = (KEEP,) if keeping else tuple(Candidate((variant,)) for variant in self.added)
        rebuild = [s for s in self._of("rebuild") if s.scalar is None and s in self.added]
        leanest = min(rebuild, key=lambda s: found[s].nbytes.middle.slope.kept_bytes, default=None)
        offload = {variant.method: variant for variant in self._of("offload")}
        self.stands_for = {
            variant: leanest
            if variant in self._of("rebuild")
            else offload.get(variant.method, variant)
            for variant in self.places
        }

    def _of(self, kind: Kind) -> list[Variant]:
        where = KINDS.index(kind)
        return [variant for variant, place in self.places.items() if place == where]

    def more(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidates with one more method, whose place is after the places of
        `candidate`'s methods; none for a candidate with a spare."""
        last = max((self.places[part] for part in candidate.parts), default=-1)
        composes = all(part.composes and part in self.added for part in candidate.parts)
        if len(candidate.parts) == self.most or not composes:
            return []
        return [
            Candidate((*candidate.parts, variant))
            for variant in self.added
            if self.places[variant] > last
            and (variant.composes or not candidate.parts)
            and not (candidate.share and Candidate((variant,)).share)
        ]

    def instead(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidates that replace one of `candidate`'s methods by a spare."""
        for at, part in enumerate(candidate.parts):
            for spare in self.spares.get(part, ()):
                yield Candidate((*candidate.parts[:at], spare, *candidate.parts[at + 1 :]))

    def ends(self, candidate: Candidate) -> bool:
        """Whether the tree adds no method to a candidate."""
        if candidate not in self._ends:
            self._ends[candidate] = not self.more(candidate)
        return self._ends[candidate]

    def ends_next(self, candidate: Candidate) -> bool:
        """Whether the tree adds no further method after adding one to a candidate."""
        if candidate not in self._ends_next:
            self._ends_next[candidate] = self.ends(candidate) or all(
                map(self.ends, self.more(candidate))
            )
        return self._ends_next[candidate]

    def plans(self, layers: int) -> int:
        """The number of plans at a layout whose longest chunk has `layers` layers: every step of
        the scalars of every candidate."""
        return sum(
            prod(part.scalar.count(layers) for part in candidate.parts if part.scalar)
            for candidate in self.candidates
        )

    @property
    def candidates(self) -> list[Candidate]:
        """The roots, and all candidates that add methods to them."""
        found = list(self.roots)
        for candidate in found:
            found += self.more(candidate)
        return found

    @cached_property
    def leanest(self) -> list[Candidate]:
        """The lean candidate of each family."""
        found: dict[Candidate, None] = {}
        waiting = [KEEP]
        while waiting:
            for more in self.more(waiting.pop()):
                lean = Candidate(tuple(self.stands_for[part] or part for part in more.parts))
                if lean not in found:
                    found[lean] = None
                    waiting.append(lean)
        return list(found)


class FixedCandidates(Tree):
    """The tree of a search for the best layout of fixed candidates.  It adds no methods.  A
    candidate with a share has a second root at the share 0, which lies before the share's first
    step."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.places, self.stands_for, self.most = {}, {}, 0
        self._ends, self._ends_next = {}, {}
        self.added, self.spares = [], {}
        self.roots = (
            *candidates,
            *(_at_zero(candidate) for candidate in candidates if candidate.share),
        )

    def more(self, candidate: Candidate) -> list[Candidate]:
        """No candidates."""
        return []


def _at_zero(candidate: Candidate) -> Candidate:
    flat = (Variant(p.method, p.at(0)) if p is candidate.share else p for p in candidate.parts)
    return Candidate(tuple(flat))


def _spares(samples: Sequence[dict[Variant, Probe]]) -> dict[Variant, list[Variant]]:
    """Spares, by the first method that is no spare itself and no worse.  Of equal methods the first
    is no spare."""
    better = {
        variant: [
            other
            for other in samples[0]
            if other != variant and all(_no_better(variant, other, sample) for sample in samples)
        ]
        for variant in samples[0]
    }
    found: dict[Variant, list[Variant]] = {}
    for variant, others in better.items():
        first = next((other for other in others if not better[other]), None)
        if first is not None:
            found.setdefault(first, []).append(variant)
    return found


def rebuilds(variant: Variant, probe: Probe) -> bool:
    """Whether a method only rebuilds activations and has no scalar."""
    return variant.scalar is None and probe.kinds == {"rebuild"}


def _no_better(variant: Variant, other: Variant, sample: dict[Variant, Probe]) -> bool:
    if not all(one in sample and rebuilds(one, sample[one]) for one in (variant, other)):
        return False
    mine, its = _numbers(sample[variant]), _numbers(sample[other])
    earlier = list(sample).index(other) < list(sample).index(variant)
    return all(b <= a for a, b in zip(mine, its, strict=True)) and (mine != its or earlier)


def _numbers(probe: Probe) -> list[float]:
    """A probe's seconds and bytes, rounded to nine digits: slopes are differences of float sums."""
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
