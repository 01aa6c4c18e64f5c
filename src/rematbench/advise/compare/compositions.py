"""The candidates of `compare`: methods, declared policies, and compositions by a rule.

The rule needs no method names. It reads from a plan which *kinds* of things the plan changes
(rebuilt tensors, offloaded tensors, operators in pieces, ...). A method's place is the position in
KINDS of its last kind. Methods with different places compose in the order of KINDS, if at most one
of them was tuned until its plan fits (a second one would have nothing left to tune). A composed
plan must keep the decisions of its base (`clash`), and it must free bytes that its base does not
free (comparison.py)."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from rematbench.advise.candidates.candidate import CompareConfig
from rematbench.evaluate.result import Result
from rematbench.plan import Plan, Settings
from rematbench.plugins.kinds import TUNED, changed_kinds, place
from rematbench.plugins.policies import Setting
from rematbench.plugins.registry import Registry
from rematbench.problem import Problem

Origin = Literal["method", "policy", "composition", "variant", "grid", "asked"]
"""Where a candidate comes from. `grid`: one of the values that a method's grid declares; `variant`:
the best of the grid, which tables show; `asked`: named by a person, and no composition contains
it."""


class Contender(Struct, frozen=True, kw_only=True):
    """A plan to be made: `method` with `settings`, applied to `base`. For a composition, `base` is
    the plan of all methods before the last. `methods`: the names of all methods of the plan.
    `first_that_fits`: settings to choose from, the fastest first and the setting with the fewest
    bytes last."""

    name: str
    origin: Origin
    methods: tuple[str, ...]
    method: str
    settings: dict[str, Setting] = {}
    smallest: str = ""
    first_that_fits: tuple[Settings, ...] = ()
    base: Plan | None = None

    @property
    def family(self) -> str:
        """The names of the composed methods without parameters, joined by `+`."""
        return "+".join(self.methods)


def first_candidates(registry: Registry, config: CompareConfig) -> list[Contender]:
    """Every method at its defaults, then the declared policies."""
    methods = [
        Contender(name=name, origin="method", methods=(name,), method=name)
        for name in registry.methods
    ]
    return methods + [
        Contender(
            name=policy.name,
            origin="policy",
            methods=(policy.method,),
            method=policy.method,
            settings=policy.settings,
            smallest=policy.smallest,
        )
        for policy in config.policies
    ]


def named_candidates(
    registry: Registry, config: CompareConfig, problem: Problem, names: Iterable[str]
) -> list[Contender]:
    """Return the candidates that a person names. A name is a method or policy as `compare` shows
    it, or any text that names a method. Raises MethodError for any other name."""
    candidates = {candidate.name: candidate for candidate in first_candidates(registry, config)}
    for name in names:
        if name not in candidates:
            methods = tuple(one.name for one in registry.resolve(name, None, problem).methods)
            candidates[name] = Contender(name=name, origin="asked", methods=methods, method=name)
    return [replace(candidates[name], origin="asked") for name in dict.fromkeys(names)]


def compositions(
    base: Plan, alone: Sequence[tuple[Contender, Plan]], most: int
) -> list[tuple[Contender, ...]]:
    """Return the compositions of single methods by the rule of this module, the shortest first,
    each in the order of application. At most `most` methods are composed. `alone`: candidates with
    their plans on `base`."""
    parts = []
    for candidate, plan in alone:
        kinds = changed_kinds(base, plan)
        if kinds:
            parts.append((place(kinds), plan.fit.get("bound") == TUNED, candidate))
    parts.sort(key=lambda part: part[0])
    return [
        tuple(candidate for _, _, candidate in group)
        for count in range(2, most + 1)
        for group in combinations(parts, count)
        if len({where for where, _, _ in group}) == count
        and sum(tuned for _, tuned, _ in group) <= 1
    ]


def composed(group: Sequence[Contender], before: Plan) -> Contender:
    """Return the candidate that applies a group's last method to the plan `before` of the
    others."""
    names = tuple(candidate.method for candidate in group)
    return Contender(
        name="+".join(candidate.name for candidate in group),
        origin="composition",
        methods=names,
        method=names[-1],
        settings=group[-1].settings,
        base=before,
    )


Pair = tuple[Contender, Result]
"""What was to be planned, and what came out."""


UNPLANNED_BYTES = 2**62
"""Missing bytes of a candidate without a plan: more than any device has."""
