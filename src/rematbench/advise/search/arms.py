"""What the plans of a search are made of: methods with settings, policies, and arms of these."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal

from msgspec import Struct

from rematbench.advise.compare.candidates import CompareConfig
from rematbench.plugins.registry import (
    IDENTITY,
    Composition,
    Method,
    MethodEntry,
    MethodError,
    Registry,
    own_settings,
    typed,
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
    entry, settings = registry.methods[method.name], own_settings(method)
    if method.name == IDENTITY:
        return []
    parameter, steps = getattr(entry.cls, "share", ("", 0))
    if parameter and parameter not in settings:
        steps = int(settings.pop("steps", steps))
        text = typed(entry, {**settings, parameter: "{}"})
        return [Single(method.name, text, Scalar("share", steps))]
    if chooses(method, registry):
        return [Single(method.name, typed(entry, {**settings, **each})) for each in entry.grid]
    return [Single(method.name, typed(entry, settings), cuts=_cuts(entry))]


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
        values = tuple(typed(entry, each) for each in settings)
        return [Single(entry.name, entry.name, Scalar("pieces", values=values), cuts=True)]
    return [Single(entry.name, typed(entry, each), cuts=_cuts(entry)) for each in settings]


def _cuts(entry: MethodEntry) -> bool:
    return bool(getattr(entry.cls, "pieces", False))
