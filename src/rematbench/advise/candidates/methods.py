"""The methods and policies that a comparison tries, and those that a search composes."""

from collections.abc import Iterable, Sequence
from itertools import product

from rematbench.advise.candidates.candidate import (
    Candidate,
    CompareConfig,
    Scalar,
    Variant,
    of_pieces,
    of_policy,
)
from rematbench.plan import Unsupported
from rematbench.plugins.kinds import changed_kinds
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
from rematbench.workload import Model

LARGEST_UNIT = 8
"""Largest group of layers that a package's policies are searched with: a probe has five groups."""


def candidates_of(composed: Composition, registry: Registry) -> tuple[Candidate, ...]:
    """The candidates of exactly these methods.  A `share` parameter without a value becomes the
    method's scalar, with the method's number of `steps`.  If a method would choose a parameter of
    its grid from the whole layout, each value gives a candidate, because a probe of a few layers
    cannot know the choice."""
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
    """Whether a method, as the user types it, places training states; MethodError if it is a
    composition that does."""
    entries = [registry.entry(method.name) for method in registry.resolve(name).methods]
    places = any(entry.moves_states for entry in entries)
    if places and len(entries) > 1:
        raise MethodError(f"{name!r}: name single methods only; search composes them itself")
    return places


def placements(registry: Registry, names: Iterable[str]) -> tuple[str, ...]:
    """The methods of `names` that place training states, at every value of their grids that the
    name does not fix."""
    return tuple(
        candidate.text()
        for name in names
        if places_states(registry, name)
        for candidate in candidates_of(registry.resolve(name), registry)
    )


def chooses(method: Method, registry: Registry) -> bool:
    """Whether a method chooses grid parameters by itself from facts that differ between the layouts
    of a group; methods in pieces do not, because they look only at shapes of tensors."""
    entry = registry.entry(method.name)
    if _cuts(entry):
        return False
    return any(getattr(method, key) is None for each in entry.grid for key in each)


def variants(
    registry: Registry, config: CompareConfig, model: Model, only: Sequence[str] = ()
) -> list[Variant]:
    """All methods, except planners and those that move states or passes, at their defaults or at
    each setting of their grids, and the policies for the model.  `only`: names of the methods and
    policies to take (empty: all)."""
    results: list[Variant] = []
    for entry in registry.methods.values():
        if entry.planner or entry.moves_states or entry.name == IDENTITY:
            continue
        if (only or entry.moves_passes) and entry.name not in only:
            continue
        results += _of_method(entry)
    for policy in config.policies:
        if (only and policy.method not in only) or not policy.applies(model):
            continue
        if policy.smallest and policy.settings.get("method") != "block":
            continue  # costs are not linear in the number of layers of a group
        results.append(of_policy(policy))
    tuned = [text for text in only if text not in registry.methods]
    return results + [_tuned(registry, text) for text in tuned]


def _tuned(registry: Registry, text: str) -> Variant:
    """A policy by its name, or a method with the settings that the user typed.  `method:` means the
    method without settings if a policy has the same name."""
    methods = registry.resolve(text).methods
    if len(methods) > 1:
        raise MethodError(f"{text!r}: name single methods only; search composes them itself")
    entry = registry.entry(methods[0].name)
    cuts, moves = _cuts(entry), entry.moves_passes
    text = text.removesuffix(":")
    return Variant(entry.name, text, composes="=" in text, cuts=cuts, moves=moves)


def _of_method(entry: MethodEntry) -> Iterable[Variant]:
    share = entry.declared("share", None)
    if share is not None:
        parameter, steps = share
        return [Variant(entry.name, f"{entry.name}:{parameter}={{}}", Scalar("share", steps))]
    settings = entry.grid or ({},)
    if len(settings) > 1 and _cuts(entry):
        return [of_pieces(entry)]
    cuts, moves = _cuts(entry), entry.moves_passes
    texts = [method_text(entry, each) for each in settings]
    return [Variant(entry.name, text, cuts=cuts, moves=moves) for text in texts]


def package_variants(
    entry: MethodEntry, problems: Iterable[Problem], only: Sequence[str] = ()
) -> list[Variant]:
    """The policies that a package's options can express on some of `problems`, with the fewest
    settings that give the same plan.  Policies that differ only in a number of layers in which
    costs are linear (`by_layer`) become one variant with that number as its scalar.  `only`: texts
    of the policies to take (empty, or the package's name: all)."""
    result = dict.fromkeys(text for text in only if text not in (entry.name, IDENTITY))
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
        for text in dict.fromkeys((*result, *seen.values()))
    ]


def _varied(entry: MethodEntry, settings: dict[str, str]) -> str:
    """A policy's text, in which the number of layers stays open if costs are linear in it."""
    parameter, linear = entry.declared("by_layer", ("", {}))
    varies = bool(linear) and linear.items() <= settings.items()
    return method_text(entry, {**settings, parameter: "{}"} if varies else settings)


def _needed(entry: MethodEntry, policy: Method, problem: Problem) -> dict[str, str] | None:
    """The settings that a policy needs for its plan; None if it has no plan or changes more than
    activations (layouts decide where states are)."""
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
