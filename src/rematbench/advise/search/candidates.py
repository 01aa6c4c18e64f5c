"""The arms that a search tries on each layout, and what each arm can add.

The rule of compositions is `compare`'s: methods whose kinds of change have different places compose
in the order of the places.  A plan is never faster than the plan that its last method was added to,
so the search adds no method to a plan that fits.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import Literal

from msgspec import Struct

from rematbench.advise.compare.candidates import KINDS, CompareConfig, Kind, place
from rematbench.advise.search.probes import Probe
from rematbench.plugins.registry import (
    IDENTITY,
    Composition,
    Method,
    MethodEntry,
    MethodError,
    Registry,
    changed_settings,
    method_text,
)

Scale = Literal["share", "layers", "pieces"]


class Scalar(Struct, frozen=True):
    """A parameter that the search raises until a plan fits.  `share`: a fraction, raised from 0 to
    1 in `steps` steps; `layers`: a number of a chunk's layers.  Seconds and bytes of a pass are
    linear in both.  `pieces`: the declared `values`; more pieces add seconds and free bytes."""

    scale: Scale
    steps: int = 0
    values: tuple[str, ...] = ()

    def count(self, layers: int) -> int:
        """The number of values, for a chunk of `layers` layers."""
        return {"share": self.steps, "layers": layers, "pieces": len(self.values)}[self.scale]


class Single(Struct, frozen=True):
    """One method of an arm.  `text` is the method with its settings; with a scalar, `text.format`
    fills in the scalar's value.  `composes` is false for policies (as in `compare`).  `cuts`:
    whether the method computes in pieces."""

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


class Arm(Struct, frozen=True):
    """Methods in their order of application; an arm without methods keeps every activation.  At
    most one part has a scalar in which costs are linear: that part is the arm's *line*."""

    parts: tuple[Single, ...] = ()

    @property
    def line(self) -> Single | None:
        """The part whose scalar is a share or a number of layers; None without such a part."""
        found = (p for p in self.parts if p.scalar is not None and p.scalar.scale != "pieces")
        return next(found, None)

    @property
    def pieces(self) -> Single | None:
        """The part that computes in pieces; None without such a part."""
        found = (p for p in self.parts if p.scalar is not None and p.scalar.scale == "pieces")
        return next(found, None)

    def without(self, part: Single) -> "Arm":
        """The arm without `part`."""
        return Arm(tuple(one for one in self.parts if one != part))

    @property
    def whole(self) -> "Arm":
        """The arm without methods that compute in pieces."""
        return Arm(tuple(part for part in self.parts if not part.cuts))

    @property
    def cutting(self) -> "Arm":
        """The arm's methods that compute in pieces, alone."""
        return Arm(tuple(part for part in self.parts if part.cuts))

    def text(self, step: int = 0, pieces: int = 1) -> str:
        """The arm's text for `Registry.resolve`, at a step of its line and of its pieces."""
        words = (part.at(pieces if part is self.pieces else step) for part in self.parts)
        return "+".join(words) or IDENTITY


KEEP = Arm()


def arms_of(composed: Composition, registry: Registry) -> tuple[Arm, ...]:
    """The arms of exactly these methods.  Where the share of a method (its `share`) is left open,
    the share is the method's scalar, in as many steps as the method's own `steps` where those are
    declared.  A method that would choose a parameter of its grid by itself, from the whole layout,
    has an arm for each value: no probe of a few layers knows the choice."""
    choices = [_settings(method, registry) for method in composed.methods]
    return tuple(Arm(parts) for parts in product(*filter(None, choices)))


def _settings(method: Method, registry: Registry) -> list[Single]:
    entry, settings = registry.methods[method.name], changed_settings(method)
    if method.name == IDENTITY:
        return []
    parameter, steps = getattr(entry.cls, "share", ("", 0))
    if parameter and parameter not in settings:
        steps = int(settings.pop("steps", steps))
        text = method_text(entry, {**settings, parameter: "{}"})
        return [Single(method.name, text, Scalar("share", steps))]
    if chooses(method, registry):
        return [
            Single(method.name, method_text(entry, {**settings, **each})) for each in entry.grid
        ]
    return [Single(method.name, method_text(entry, settings), cuts=_cuts(entry))]


def chooses(method: Method, registry: Registry) -> bool:
    """Whether a method, as it is set, chooses parameters of its grid by itself, from more than what
    the layouts of a shard share (pieces follow from the shapes of tensors)."""
    entry = registry.methods[method.name]
    if _cuts(entry):
        return False
    return any(getattr(method, key) is None for each in entry.grid for key in each)


def singles(registry: Registry, config: CompareConfig, only: Sequence[str] = ()) -> list[Single]:
    """Every method that is not a planner, at its defaults or at each setting of its grid, and the
    policies.  `only`: the names of the methods and policies to take; empty for all."""
    found: list[Single] = []
    for entry in registry.methods.values():
        if entry.planner or entry.name == IDENTITY or (only and entry.name not in only):
            continue
        found += _of_method(entry)
    for policy in config.policies:
        if only and policy.method not in only:
            continue
        scalar = Scalar("layers") if policy.smallest == "num_layers" else None
        if policy.smallest and policy.settings.get("method") != "block":
            continue  # a group policy: costs are not linear in the layers of a group
        text = f"{policy.name} {{}}" if scalar else policy.name
        found.append(Single(policy.method, text, scalar, composes=False))
    tuned = [text for text in only if text not in registry.methods]
    return found + [_tuned(registry, text) for text in tuned]


def _tuned(registry: Registry, text: str) -> Single:
    """A method with settings that the user typed, or a policy by its name."""
    methods = registry.resolve(text).methods
    if len(methods) > 1:
        raise MethodError(f"{text!r}: one method at a time; search composes them itself")
    cuts = _cuts(registry.methods[methods[0].name])
    return Single(methods[0].name, text, composes="=" in text, cuts=cuts)


def _of_method(entry: MethodEntry) -> Iterable[Single]:
    share = getattr(entry.cls, "share", None)
    if share is not None:
        parameter, steps = share
        return [Single(entry.name, f"{entry.name}:{parameter}={{}}", Scalar("share", steps))]
    settings = entry.grid or ({},)
    if len(settings) > 1 and _cuts(entry):
        values = tuple(method_text(entry, each) for each in settings)
        return [Single(entry.name, entry.name, Scalar("pieces", values=values), cuts=True)]
    return [Single(entry.name, method_text(entry, each), cuts=_cuts(entry)) for each in settings]


def _cuts(entry: MethodEntry) -> bool:
    return bool(getattr(entry.cls, "pieces", False))


class Tree:
    """Arms, and the methods that each arm can add, by the kinds of change of the singles.

    The *lean* arm of an arm has, for each method that offloads, the last setting of the method's
    grid, and for each method that rebuilds, the rebuilding method that keeps the fewest bytes.  A
    *family* is the arms that have the same lean arm.  `keeping`: whether the arm that keeps every
    activation is one of the arms.

    A method that rebuilds is a *spare* of another such method that is no slower and keeps no more
    bytes on every sample.  A spare is tried in place of that method where the allocator alone keeps
    that method from fitting: what the allocator reserves follows no order of kept bytes.  With
    `exact` no method is a spare."""

    roots: tuple[Arm, ...]
    """The arms that a search begins with on every layout."""

    def __init__(
        self,
        samples: Sequence[dict[Single, Probe]],
        most: int,
        *,
        keeping: bool = True,
        exact: bool = False,
    ) -> None:
        found = {single: probe for single, probe in samples[0].items() if probe.kinds}
        self.places = {single: place(probe.kinds) for single, probe in found.items()}
        self.spares = {} if exact else _spares(samples)
        idle = {spare for spares in self.spares.values() for spare in spares}
        self.added = [single for single in self.places if single not in idle]
        self.most = most
        self._ends: dict[Arm, bool] = {}
        self._ends_next: dict[Arm, bool] = {}
        self.roots = (KEEP,) if keeping else tuple(Arm((single,)) for single in self.added)
        rebuild = [s for s in self._of("rebuild") if s.scalar is None and s in self.added]
        leanest = min(rebuild, key=lambda s: found[s].nbytes.middle.slope.kept_bytes, default=None)
        offload = {single.method: single for single in self._of("offload")}
        self.stands_for = {
            single: leanest if single in self._of("rebuild") else offload.get(single.method, single)
            for single in self.places
        }

    def _of(self, kind: Kind) -> list[Single]:
        where = KINDS.index(kind)
        return [single for single, place in self.places.items() if place == where]

    def more(self, arm: Arm) -> list[Arm]:
        """The arms with one more method, whose place is after the places of `arm`'s methods; none
        for an arm with a spare."""
        last = max((self.places[part] for part in arm.parts), default=-1)
        composes = all(part.composes and part in self.added for part in arm.parts)
        if len(arm.parts) == self.most or not composes:
            return []
        return [
            Arm((*arm.parts, single))
            for single in self.added
            if self.places[single] > last
            and (single.composes or not arm.parts)
            and not (arm.line and Arm((single,)).line)
        ]

    def instead(self, arm: Arm) -> Iterator[Arm]:
        """The arms with a spare in place of one of `arm`'s methods."""
        for at, part in enumerate(arm.parts):
            for spare in self.spares.get(part, ()):
                yield Arm((*arm.parts[:at], spare, *arm.parts[at + 1 :]))

    def ends(self, arm: Arm) -> bool:
        """Whether no method is added to an arm."""
        if arm not in self._ends:
            self._ends[arm] = not self.more(arm)
        return self._ends[arm]

    def ends_next(self, arm: Arm) -> bool:
        """Whether no method is added to the arms that are made by adding a method to an arm."""
        if arm not in self._ends_next:
            self._ends_next[arm] = self.ends(arm) or all(map(self.ends, self.more(arm)))
        return self._ends_next[arm]

    def lean(self, arm: Arm) -> Arm:
        """The lean arm of an arm's family, without the method that computes in pieces."""
        parts = (self.stands_for[part] or part for part in arm.parts if not part.cuts)
        return Arm(tuple(parts))

    def plans(self, layers: int) -> int:
        """The number of plans at a layout whose longest chunk has `layers` layers: every step of
        the scalars of every arm."""
        return sum(
            prod(part.scalar.count(layers) for part in arm.parts if part.scalar)
            for arm in self.arms
        )

    @property
    def arms(self) -> list[Arm]:
        """The roots, and every arm that is made of these by adding methods."""
        found = list(self.roots)
        for arm in found:
            found += self.more(arm)
        return found

    @cached_property
    def families(self) -> list[tuple[Arm, Arm | None]]:
        """Each family: its lean arm, and the arm of its pieces alone (None without pieces)."""
        found: dict[tuple[Arm, Arm | None], None] = {}
        waiting = [KEEP]
        while waiting:
            for more in self.more(waiting.pop()):
                key = self.family(more)
                if key not in found:
                    found[key] = None
                    waiting.append(Arm((*key[0].parts, *(key[1].parts if key[1] else ()))))
        return list(found)

    def family(self, arm: Arm) -> tuple[Arm, Arm | None]:
        """The family of an arm: its lean arm, and the arm of its pieces alone or None."""
        cutting = arm.cutting
        return self.lean(arm), cutting if cutting.parts else None


class Given(Tree):
    """The tree of a search for the best layout of given arms, to which no method is added.  An arm
    with a line has a second root at the share 0, which lies before the line's first step."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.places, self.stands_for, self.most = {}, {}, 0
        self._ends, self._ends_next = {}, {}
        self.added, self.spares = [], {}
        self.roots = (*arms, *(_at_zero(arm) for arm in arms if arm.line))

    def more(self, arm: Arm) -> list[Arm]:
        """No arms."""
        return []


def _at_zero(arm: Arm) -> Arm:
    flat = (Single(p.method, p.at(0)) if p is arm.line else p for p in arm.parts)
    return Arm(tuple(flat))


def _spares(samples: Sequence[dict[Single, Probe]]) -> dict[Single, list[Single]]:
    """Spares, by the first method that is no spare itself and no worse.  Of equal methods the first
    is no spare."""
    better = {
        single: [
            other
            for other in samples[0]
            if other != single and all(_no_better(single, other, sample) for sample in samples)
        ]
        for single in samples[0]
    }
    found: dict[Single, list[Single]] = {}
    for single, others in better.items():
        first = next((other for other in others if not better[other]), None)
        if first is not None:
            found.setdefault(first, []).append(single)
    return found


def rebuilds(single: Single, probe: Probe) -> bool:
    """Whether a method only rebuilds activations and has no scalar."""
    return single.scalar is None and probe.kinds == {"rebuild"}


def _no_better(single: Single, other: Single, sample: dict[Single, Probe]) -> bool:
    if not all(one in sample and rebuilds(one, sample[one]) for one in (single, other)):
        return False
    mine, its = _numbers(sample[single]), _numbers(sample[other])
    earlier = list(sample).index(other) < list(sample).index(single)
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
