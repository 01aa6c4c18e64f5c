"""The plans that a search tries on each layout: methods with settings, policies, compositions.

The rule of compositions is `compare`'s: methods whose kinds of change have different places compose
in the order of the places.  A plan is never faster than the plans that it is composed of, so where
one of them fits, what is made of it is not tried.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from rematbench.choose.candidates import KINDS, CompareConfig, Kind, place
from rematbench.plugins.registry import IDENTITY, MethodEntry, Registry, typed
from rematbench.search.probe import Probe

Scale = Literal["share", "layers", "pieces"]


class Scalar(Struct, frozen=True):
    """A parameter that is raised until a plan fits.  A `share` in so many `steps` from nothing to
    all and the `layers` of a chunk: seconds and bytes of a pass are a line in them.  `pieces`: the
    declared `values`, which only cost time and only free bytes."""

    scale: Scale
    steps: int = 0
    values: tuple[str, ...] = ()


class Single(Struct, frozen=True):
    """One method of an arm.  `text` names it; with a scalar, `text` at a value is `text.format`."""

    method: str
    text: str
    scalar: Scalar | None = None

    def at(self, step: int) -> str:
        """The text at a value of the scalar."""
        if self.scalar is None:
            return self.text
        match self.scalar.scale:
            case "share":
                return self.text.format(step / self.scalar.steps)
            case "pieces":
                return self.scalar.values[min(step, len(self.scalar.values)) - 1]
        return self.text.format(step)


class Arm(Struct, frozen=True):
    """Methods in order of application; none: keep everything.  One part at most has a scalar that
    is a line."""

    parts: tuple[Single, ...] = ()

    @property
    def line(self) -> Single | None:
        """The part whose scalar is a line."""
        found = (p for p in self.parts if p.scalar is not None and p.scalar.scale != "pieces")
        return next(found, None)

    @property
    def pieces(self) -> Single | None:
        """The part that computes in pieces."""
        found = (p for p in self.parts if p.scalar is not None and p.scalar.scale == "pieces")
        return next(found, None)

    def without(self, part: Single) -> "Arm":
        """The arm with one part less."""
        return Arm(tuple(one for one in self.parts if one != part))

    def text(self, step: int = 0, pieces: int = 1) -> str:
        """What `resolve` reads, at a step of the line and of the pieces."""
        words = (part.at(pieces if part is self.pieces else step) for part in self.parts)
        return "+".join(words) or IDENTITY


KEEP = Arm()


def singles(registry: Registry, config: CompareConfig, only: Sequence[str] = ()) -> list[Single]:
    """Every method that is no planner, at its defaults or in its grid, and the policies; of `only`
    some methods, where some are named."""
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
            continue  # groups: no line in the layers of a group
        text = f"{policy.name} {{}}" if scalar else policy.name
        found.append(Single(policy.method, text, scalar))
    return found


def _of_method(entry: MethodEntry) -> Iterable[Single]:
    share = getattr(entry.cls, "share", None)
    if share is not None:
        parameter, steps = share
        return [Single(entry.name, f"{entry.name}:{parameter}={{}}", Scalar("share", steps))]
    settings = entry.grid or ({},)
    if len(settings) > 1 and getattr(entry.cls, "pieces", False):
        values = tuple(typed(entry, each) for each in settings)
        return [Single(entry.name, entry.name, Scalar("pieces", values=values))]
    return [Single(entry.name, typed(entry, each)) for each in settings]


class Tree:
    """Arms and what may be added to each, by the kinds of things that the singles change.  `lean`:
    arms that need as few bytes as any, at the ends of their scalars."""

    def __init__(self, probes: dict[Single, Probe], most: int) -> None:
        found = {single: probe for single, probe in probes.items() if probe.kinds}
        self.places = {single: place(probe.kinds) for single, probe in found.items()}
        self.most = most
        self.lean = self._lean(found)

    def more(self, arm: Arm) -> list[Arm]:
        """The arms with one method more, of a later place."""
        last = max((self.places[part] for part in arm.parts), default=-1)
        if len(arm.parts) == self.most:
            return []
        return [
            Arm((*arm.parts, single))
            for single, where in self.places.items()
            if where > last and not (arm.line and Arm((single,)).line)
        ]

    def _lean(self, probes: dict[Single, Probe]) -> list[Arm]:
        """For each method that offloads, and without one: with the rebuilder that keeps least; and
        keeping everything."""

        def of(kind: Kind) -> list[Single]:
            where = KINDS.index(kind)
            return [single for single, place in self.places.items() if place == where]

        def kept(single: Single) -> float:
            return probes[single].facts.middle.slope.kept_bytes

        rebuild = [s for s in of("rebuild") if s.scalar is None]
        leanest = [min(rebuild, key=kept)] if rebuild else []
        offload: dict[str, Single] = {single.method: single for single in of("offload")}
        groups = [[], *([single] for single in offload.values())]
        arms = [(*first, *group) for group in groups for first in (leanest, [])]
        return [KEEP, *(Arm(parts) for parts in arms)]
