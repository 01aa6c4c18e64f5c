"""The candidates of `compare`: methods, declared policies, and compositions by a rule.

The rule needs no method names.  It reads from a plan which *kinds* of things the plan changes
(rebuilt tensors, offloaded tensors, operators in pieces, ...).  A method's place is the position of
its last kind in KINDS.  Methods with different places compose in the order of KINDS, if at most one
of them was tuned until its plan fits (a second one would have nothing left to tune).  A composed
plan must keep the decisions of its base (`clash`) and need fewer bytes (comparison.py)."""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Literal

from msgspec.structs import replace

from rematbench.advise.candidates.candidate import Candidate, CompareConfig, Variant, of_policy
from rematbench.evaluate.result import Result
from rematbench.plan import Plan
from rematbench.plugins.kinds import TUNED, changed_kinds, place
from rematbench.plugins.registry import Registry
from rematbench.problem import Problem

Origin = Literal["method", "policy", "composition", "variant", "grid", "asked"]
"""Where a candidate comes from.  `grid`: a setting of a method's grid; `variant`: the best setting
of a grid, which tables show; `asked`: named by the user, and part of no composition."""


class Contender(Candidate, frozen=True, kw_only=True):
    """A candidate of a comparison.  `base`: the plan of all parts but the last, to which the last
    part is applied (None: the job's plan).  A part in pieces takes the first of its values that
    fits, a policy the smallest number that fits."""

    origin: Origin
    base: Plan | None = None

    @property
    def name(self) -> str:
        """The candidate's text, without numbers that are not chosen yet."""
        return "+".join(part.text.removesuffix(" {}") for part in self.parts)

    @property
    def family(self) -> str:
        """The names of the composed methods without parameters, joined by `+`."""
        return "+".join(part.method for part in self.parts)

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.family.split("+"))

    def tuned(self, step: int) -> "Contender":
        """The candidate with the scalar of its last part set to a step."""
        *before, last = self.parts
        return replace(self, parts=(*before, Variant(last.method, last.at(step))))

    def named(self, text: str) -> "Contender":
        """The candidate with a single part: `text`, from which its plan was made."""
        return replace(self, parts=(Variant(self.family, text),))


def first_candidates(
    registry: Registry, config: CompareConfig, problem: Problem
) -> list[Contender]:
    """Every method that does not move passes, at its defaults, then the declared policies for the
    model and the stack."""
    methods = [
        Contender((Variant(name, name),), origin="method")
        for name, entry in registry.methods.items()
        if not entry.moves_passes
    ]
    return methods + [
        Contender((of_policy(policy),), origin="policy")
        for policy in config.policies
        if policy.applies(problem.workload.model, problem.system)
    ]


def named_candidates(
    registry: Registry, config: CompareConfig, problem: Problem, names: Iterable[str]
) -> list[Contender]:
    """The candidates that a user names: a method or policy as `compare` shows it, or any text that
    names a method.  MethodError for other names."""
    first = first_candidates(registry, config, problem)
    candidates = {candidate.name: candidate for candidate in first}
    for name in names:
        if name not in candidates:
            methods = registry.resolve(name, None, problem).methods
            family = "+".join(method.name for method in methods)
            candidates[name] = Contender((Variant(family, name),), origin="asked")
    return [replace(candidates[name], origin="asked") for name in dict.fromkeys(names)]


# Why: docs/decisions/advise.md, Is there a list of compositions?
def compositions(
    base: Plan, alone: Sequence[tuple[Contender, Plan]], most: int
) -> list[tuple[Contender, ...]]:
    """The compositions of single methods by the rule of this module, shortest first, each in the
    order of application.  At most `most` methods are composed.  `alone`: candidates with their
    plans on `base`."""
    parts = []
    for candidate, plan in alone:
        if kinds := changed_kinds(base, plan):
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
    """The candidate that applies a group's last method to the plan `before` of the others."""
    parts = tuple(part for candidate in group for part in candidate.parts)
    return Contender(parts, origin="composition", base=before)


Pair = tuple[Contender, Result]
"""A candidate and its result."""
UNPLANNED_BYTES = 2**62
"""The missing bytes of a candidate without a plan, more than any device has."""
