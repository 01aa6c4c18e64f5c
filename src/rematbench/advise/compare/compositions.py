"""The candidates of `compare`: methods, declared policies, and compositions by a rule.

The rule needs no method names. It reads from a plan which *kinds* of things the plan changes
(rebuilt tensors, offloaded tensors, operators in pieces, ...). A method's place is the position in
KINDS of its last kind. Methods with different places compose in the order of KINDS, if at most one
of them was tuned until its plan fits (a second one would have nothing left to tune). A composed
plan must keep the decisions of its base (`clash`), and it must free bytes that its base does not
free (comparison.py).
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from rematbench.host.workers import NoAnswer
from rematbench.inputs.configfile import convert, read_mapping
from rematbench.inputs.paths import data_dir
from rematbench.plan import ByteBudget, Fate, Offload, Plan, Recompute, Settings, Split
from rematbench.plugins.policies import LABEL, Policy, Setting
from rematbench.plugins.registry import Registry
from rematbench.problem import Problem
from rematbench.solve.kept import overruled
from rematbench.workload import PositiveInt

Kind = Literal["partition", "rebuild", "offload", "states", "ends", "pieces"]
KINDS: tuple[Kind, ...] = ("partition", "rebuild", "offload", "states", "ends", "pieces")
"""Kinds in the order of application. An offloader moves what a rebuilder keeps; pieces are cut
last, from whole tensors. `ends`: fates of the embedding or the head alone."""

TUNED = "device ledger"
"""The `bound` that a method notes when it chose the smallest reduction that fits the device."""

Origin = Literal["method", "policy", "composition", "variant", "grid", "asked"]
"""Where a candidate comes from. `grid`: one of the values that a method's grid declares; `variant`:
the best of the grid, which tables show; `asked`: named by a person, and no composition contains
it."""


class CompareConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of config/compare.yaml."""

    policies: tuple[Policy, ...]
    most_methods: PositiveInt
    shown_share: Annotated[float, Meta(ge=0.0, le=1.0)]


class Candidate(Struct, frozen=True, kw_only=True):
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


def load_compare() -> CompareConfig:
    """The policies and limits of config/compare.yaml."""
    data = read_mapping(data_dir("config") / "compare.yaml", LABEL)
    return convert(data, CompareConfig, LABEL)


def first_candidates(registry: Registry, config: CompareConfig) -> list[Candidate]:
    """Every method at its defaults, then the declared policies."""
    methods = [
        Candidate(name=name, origin="method", methods=(name,), method=name)
        for name in registry.methods
    ]
    return methods + [
        Candidate(
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
) -> list[Candidate]:
    """Return the candidates that a person names. A name is a method or policy as `compare` shows
    it, or any text that names a method. Raises MethodError for any other name."""
    candidates = {candidate.name: candidate for candidate in first_candidates(registry, config)}
    for name in names:
        if name not in candidates:
            methods = tuple(one.name for one in registry.resolve(name, None, problem).methods)
            candidates[name] = Candidate(name=name, origin="asked", methods=methods, method=name)
    return [replace(candidates[name], origin="asked") for name in dict.fromkeys(names)]


def changed_kinds(base: Plan, plan: Plan) -> frozenset[Kind]:
    """The kinds of things in which a plan differs from its base."""
    found: set[Kind] = set()
    for rule in plan.rules[len(base.rules) :]:
        ends = rule.select.parts is not None and "layer" not in rule.select.parts
        kinds = _fate_kinds(rule.fate)
        found |= {"ends"} if ends and kinds else kinds
    layout = ("partition", "schedule", "orders")
    if any(getattr(plan, key) != getattr(base, key) for key in layout):
        found.add("partition")
    if plan.states != base.states:
        found.add("states")
    if plan.mini_sequences != base.mini_sequences:
        found.add("pieces")
    return frozenset(found)


def _fate_kinds(fate: Fate) -> set[Kind]:
    match fate:
        case Recompute():
            return {"rebuild"}
        case Offload():
            return {"offload"}
        case ByteBudget(alpha=alpha):
            return {"offload"} if alpha else set()
        case Split(offload=offload, recompute=recompute):
            shares: dict[Kind, float] = {"offload": offload, "rebuild": recompute}
            return {kind for kind, share in shares.items() if share}
    return set()


def place(kinds: Iterable[Kind]) -> int:
    """Return the index in KINDS at which a method with these kinds of change composes."""
    return max(KINDS.index(kind) for kind in kinds)


def compositions(
    base: Plan, alone: Sequence[tuple[Candidate, Plan]], most: int
) -> list[tuple[Candidate, ...]]:
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


def clash(problem: Problem, base: Plan, plan: Plan) -> str:
    """Return the decisions of `base` that a composed plan overrules; empty if there are none."""
    for key in ("partition", "schedule", "orders"):
        if getattr(base, key) not in (getattr(problem.base_plan, key), getattr(plan, key)):
            return key
    offloads = any("offload" in _fate_kinds(rule.fate) for rule in base.rules)
    if offloads and plan.transfers != base.transfers:
        return "transfers"
    return overruled(problem, base, plan)


def composed(group: Sequence[Candidate], before: Plan) -> Candidate:
    """Return the candidate that applies a group's last method to the plan `before` of the
    others."""
    names = tuple(candidate.method for candidate in group)
    return Candidate(
        name="+".join(candidate.name for candidate in group),
        origin="composition",
        methods=names,
        method=names[-1],
        settings=group[-1].settings,
        base=before,
    )


def lost_reason(why: NoAnswer, limit_s: int) -> str:
    """Explain why a worker gave no result for a candidate, which had `limit_s` CPU seconds."""
    if why == "died":
        return "the worker process died"
    return f"planning took more than {limit_s} CPU seconds (raise --limit)"
