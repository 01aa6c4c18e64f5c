"""What `compare` tries: methods, declared policies, and the compositions that a rule allows.

The rule needs no names.  A plan changes *kinds* of things (what is rebuilt, what is offloaded, what
is computed in pieces, ...), read off the plan itself; methods compose when they change different
kinds, in the order of KINDS, and at most one of them is tuned until the plan fits (a second one
would find nothing left to do).
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from rematbench.configfile import convert, read_mapping
from rematbench.discover import Registry
from rematbench.paths import data_dir
from rematbench.plan import ByteBudget, Fate, Offload, Plan, Recompute, Split
from rematbench.problem import Problem
from rematbench.workload import PositiveInt

Kind = Literal["partition", "rebuild", "offload", "states", "ends", "pieces"]
KINDS: tuple[Kind, ...] = ("partition", "rebuild", "offload", "states", "ends", "pieces")
"""In the order in which methods apply: an offloader moves what a rebuilder keeps, and pieces are
cut last, from what is left whole.  `ends`: fates of the embedding or the head alone."""

TUNED = "device ledger"
"""What a method notes as its `bound` when it took the least that fits the device."""

Origin = Literal["method", "policy", "composition"]
Setting = str | int | float | bool | list[str]


class Policy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A baseline of config/compare.yaml: a method with settings, and perhaps a parameter to tune
    (`smallest`: raised from 1 until the plan fits)."""

    name: str
    method: str
    why: str
    settings: dict[str, Setting] = {}
    smallest: str = ""


class CompareConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config/compare.yaml."""

    policies: tuple[Policy, ...]
    most_methods: PositiveInt
    shown_share: Annotated[float, Meta(ge=0.0, le=1.0)]
    context_factor: Annotated[float, Meta(ge=1.0)]


class Candidate(Struct, frozen=True, kw_only=True):
    """One plan to make: `method` with `settings`, on `base` (a composition: the plan so far).
    `methods` are the names of all methods that the plan is made of."""

    name: str
    origin: Origin
    methods: tuple[str, ...]
    method: str
    settings: dict[str, Setting] = {}
    smallest: str = ""
    base: Plan | None = None

    @property
    def family(self) -> str:
        """The composed method, parameters apart."""
        return "+".join(self.methods)


class Made(Struct, frozen=True, kw_only=True):
    """A candidate's plan, the kinds of things it changed, and whether it was tuned to fit."""

    candidate: Candidate
    plan: Plan
    kinds: frozenset[Kind]
    tuned: bool


def load_compare() -> CompareConfig:
    """The committed policies and limits."""
    label = "config/compare.yaml"
    return convert(read_mapping(data_dir("config") / "compare.yaml", label), CompareConfig, label)


def first_candidates(registry: Registry, config: CompareConfig) -> list[Candidate]:
    """Every method at its defaults, then the policies."""
    own = [
        Candidate(name=name, origin="method", methods=(name,), method=name)
        for name in registry.methods
    ]
    return own + [
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


def present(settings: dict[str, Setting], problem: Problem) -> dict[str, Setting]:
    """A policy's settings with operators that no layer of the problem has left out."""
    ops = settings.get("ops")
    if not isinstance(ops, list):
        return settings
    known = {op.name for table in problem.layer_kinds for op in table.ops}
    return {**settings, "ops": [name for name in ops if name in known]}


def changed_kinds(base: Plan, plan: Plan) -> frozenset[Kind]:
    """The kinds of things that a plan has other than its base."""
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


def same_plan(plan: Plan) -> bytes:
    """Equal for plans that do the same, whatever their methods noted."""
    return msgspec.json.encode(replace(plan, fit={}))


def compositions(made: Sequence[Made], most: int) -> list[tuple[Made, ...]]:
    """The sensible compositions of single methods, shortest first, each in order of application."""
    alone = [m for m in made if m.candidate.origin == "method" and m.kinds]
    found: list[tuple[Made, ...]] = []
    for count in range(2, most + 1):
        found += [_ordered(group) for group in combinations(alone, count) if _compose(group)]
    return found


def _compose(group: Sequence[Made]) -> bool:
    kinds = [kind for made in group for kind in made.kinds]
    return len(kinds) == len(set(kinds)) and sum(made.tuned for made in group) <= 1


def _ordered(group: Iterable[Made]) -> tuple[Made, ...]:
    return tuple(sorted(group, key=lambda made: min(KINDS.index(kind) for kind in made.kinds)))


def composed(group: Sequence[Made], before: Plan) -> Candidate:
    """The last method of a group on the plan of those before it."""
    names = tuple(made.candidate.method for made in group)
    return Candidate(
        name="+".join(names), origin="composition", methods=names, method=names[-1], base=before
    )
