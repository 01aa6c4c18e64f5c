"""The kinds of changes that a plan makes, which decide the order in which methods compose.

The rule needs no names of methods, because it reads the kinds from plans.  A method's place is the
position in KINDS of its last kind.  Methods with different places compose in the order of KINDS."""

from collections.abc import Iterable
from typing import Literal

from rematbench.plan import Fate, Plan, Recompute, Split, leaves
from rematbench.problem import Problem
from rematbench.solve.kept import overruled

ChangeKind = Literal["partition", "rebuild", "offload", "states", "ends", "pieces"]


KINDS: tuple[ChangeKind, ...] = ("partition", "rebuild", "offload", "states", "ends", "pieces")
"""Kinds in the order of application.  Offloading follows recomputation, because it moves what is
still kept; pieces come last, because they divide whole tensors.  `ends`: fates of only the
embedding or the head."""


TUNED = "device ledger"
"""The `bound` that a method notes if it chose the smallest reduction with which the plan fits."""


def changed_kinds(base: Plan, plan: Plan) -> frozenset[ChangeKind]:
    """The kinds of changes that a plan makes to its base."""
    found: set[ChangeKind] = set()
    for rule in plan.rules[len(base.rules) :]:
        ends = rule.select.parts is not None and "layer" not in rule.select.parts
        kinds = _fate_kinds(rule.fate)
        found |= {"ends"} if ends and kinds else kinds
    layout = ("partition", "schedule", "orders", "slices")
    if any(getattr(plan, key) != getattr(base, key) for key in layout):
        found.add("partition")
    if plan.states != base.states:
        found.add("states")
    if plan.mini_sequences != base.mini_sequences:
        found.add("pieces")
    return frozenset(found)


def _fate_kinds(fate: Fate) -> set[ChangeKind]:
    kinds: dict[ChangeKind, bool] = {
        "offload": leaves(fate),
        "rebuild": isinstance(fate, Recompute) or (isinstance(fate, Split) and fate.recompute > 0),
    }
    return {kind for kind, holds in kinds.items() if holds}


def place(kinds: Iterable[ChangeKind]) -> int:
    """Return the index in KINDS at which a method with these kinds of change composes."""
    return max(KINDS.index(kind) for kind in kinds)


# Why: docs/decisions/advise.md, Is a composition judged by the plans of its parts?
def clash(problem: Problem, base: Plan, plan: Plan) -> str:
    """Return the decision of `base` that a composed plan overrides, as a word; empty if none."""
    for key in ("partition", "schedule", "orders", "slices"):
        if getattr(base, key) not in (getattr(problem.base_plan, key), getattr(plan, key)):
            return key
    if copies(base) and plan.transfers != base.transfers:
        return "transfers"
    return overruled(problem, base, plan)


def copies(plan: Plan) -> bool:
    """Whether a plan copies activations to the host."""
    return any(leaves(rule.fate) for rule in plan.rules)
