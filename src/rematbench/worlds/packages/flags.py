"""The options with which a baseline runs a plan: those of the policy whose plan is equal, or those
of the nearest policy together with the differences of its plan.

Two plans are equal if every saved tensor of every chunk has the same fate in bytes in every phase,
and if order, partition, states, mini-sequences and kind of transfers are the same.
"""

from collections.abc import Container, Iterator
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.engine.lowering.blocks.fates import PHASES, Resolved, resolve
from rematbench.evaluate.effects import acting
from rematbench.evaluate.result import evaluate_plan
from rematbench.evaluate.unread import fact_words
from rematbench.host.declared import flat
from rematbench.inputs.stackfacts import NO_FACTS
from rematbench.inputs.system import FACTS, Accepts
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import MethodEntry
from rematbench.problem import Problem
from rematbench.worlds.packages.limits import NOT_RUN, without_options
from rematbench.worlds.packages.process import baselines
from rematbench.worlds.records.refusals import refusals

Table = dict[tuple[Any, ...], Resolved]
KINDS = ("partition", "schedule", "orders", "slices", "states", "mini_sequences", "held")


class FlagsAnswer(Struct, frozen=True, kw_only=True):
    """A baseline's options for a wanted plan: `settings` and `flags` of the policy whose plan is
    equal or nearest, and that `plan`. `missing` lists where this plan differs and which features of
    the problem the baseline cannot express; empty if the plans are equal. `assumed`: facts of the
    stack that no option gives. `not_run`: why this baseline does not run the job, although the job
    has options. `remarks`: what the options leave out."""

    baseline: str
    settings: dict[str, Any] = {}
    flags: str = ""
    missing: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    plan: Plan | None = None


class Costs(Struct, frozen=True, kw_only=True):
    """The costs of a plan relative to another plan: the difference of the largest device peaks in
    bytes, the relative difference of the step times, and the free device bytes of the fullest rank
    (negative: out of memory)."""

    peak_bytes: int
    step_share: float
    headroom_bytes: int


def costs(problem: Problem, plan: Plan, alternative: Plan) -> Costs | None:
    """The costs of `alternative` relative to `plan`; None if either plan cannot be lowered."""
    try:
        own, changed = evaluate_plan(problem, plan), evaluate_plan(problem, alternative)
    except PlanError:
        return None
    assert own.evaluation is not None
    assert changed.evaluation is not None
    assert changed.verdict is not None
    there, here = changed.evaluation.peak_device_bytes, own.evaluation.peak_device_bytes
    return Costs(
        peak_bytes=max(there) - max(here),
        step_share=changed.evaluation.step_s / own.evaluation.step_s - 1,
        headroom_bytes=changed.verdict.headroom_bytes,
    )


def flags_of(problem: Problem, plan: Plan, baseline: str, *, whole: bool = False) -> FlagsAnswer:
    """The options of a baseline for `plan`: those of the policy with an equal plan, otherwise those
    of the nearest policy, whose plan gives the fewest bytes a different fate. `missing` also names
    the features of the problem that no policy of the baseline can express. `whole`: the options
    include the arguments of the model."""
    wanted = fates(problem, plan)
    cls = baselines()[baseline].cls
    reasons: tuple[str, ...] = cls.inexpressible(problem)
    inexpressible = without_options(reasons)
    said: dict[str, Any] = {
        "baseline": baseline,
        "assumed": assumed_facts(problem, plan, cls.facts_with_options(problem)),
        "remarks": () if whole else getattr(cls, "remarks", lambda _: ())(problem),
        "not_run": tuple(reason for reason in reasons if reason.endswith(NOT_RUN)),
    }
    base = problem.base_plan
    if cls.partition(problem, plan):
        base = replace(base, partition=plan.partition)
    nearest: tuple[int, FlagsAnswer] | None = None
    for candidate, made in candidate_plans(problem, baseline, base):
        found = fates(problem, made)
        otherwise = sum(_apart_bytes(fate, found.get(site)) for site, fate in wanted.items())
        missing = (*_sites(wanted, found), *_rest(plan, made, offloads_any(wanted)), *inexpressible)
        answer = FlagsAnswer(
            **said,
            settings={f: getattr(candidate, f) for f in candidate.__struct_fields__},
            flags=candidate.flags(problem, made, whole=whole),
            missing=missing,
            plan=made,
        )
        if len(missing) == len(inexpressible):
            return answer
        if nearest is None or otherwise < nearest[0]:
            nearest = otherwise, answer
    return nearest[1] if nearest else FlagsAnswer(**said, missing=inexpressible)


def assumed_facts(problem: Problem, plan: Plan, known: Container[str]) -> tuple[str, ...]:
    """The facts of the stack, with values, that change a plan's bytes or seconds and are not
    `known`."""
    others = (*NO_FACTS, *Accepts.__struct_fields__)
    facts = [fact for fact in FACTS if fact not in others and fact not in known]
    values = flat(problem.system)
    return tuple(fact_words(fact, values[fact]) for fact in acting(problem, plan, facts))


def candidate_plans(
    problem: Problem, baseline: str, base: Plan | None = None
) -> Iterator[tuple[Any, Plan]]:
    """The policies of a baseline that have options for the problem, with their plans on `base` (the
    problem's base plan)."""
    base = problem.base_plan if base is None else base
    for candidate in baselines()[baseline].cls.candidates(problem):
        made = candidate.plan(problem, base)
        if not isinstance(made, Unsupported):
            yield candidate, made


def alike(problem: Problem, plan: Plan, other: Plan) -> bool:
    """Whether two plans are equal in every fate and in everything else that `flags` compares."""
    mine, theirs = fates(problem, plan), fates(problem, other)
    return mine == theirs and not _rest(plan, other, offloads_any(mine))


def fates(problem: Problem, plan: Plan) -> Table:
    """The fate of every site by (rank, chunk, phase, part, layer in the chunk, activation)."""
    table: Table = {}
    for rank, chunks in enumerate(plan.partition):
        for chunk in range(len(chunks)):
            table |= _chunk_fates(problem, plan, rank, chunk)
    return table


def _chunk_fates(problem: Problem, plan: Plan, rank: int, chunk: int) -> Table:
    table: Table = {}
    sites = ChunkOps.of_plan(problem, plan, rank, chunk).sites
    for phase in PHASES:
        found, _ = resolve(plan, sites, phase, 0)
        table |= {(rank, chunk, phase, *site): _plain(fate) for site, fate in found.items()}
    return table


def _plain(fate: Resolved) -> Resolved:
    """The fate; if no byte is rebuilt, without `scope`, `whole` and `window`, which mean nothing
    then."""
    if fate.recompute_bytes:
        return fate
    return Resolved(fate.keep_bytes, fate.offload_bytes, 0, peer_bytes=fate.peer_bytes)


class Offers:
    """The plans of a package's policies, each with the fates of its first chunk. A plan is made
    when it is first iterated over, and kept for later iterations."""

    def __init__(self, problem: Problem, name: str) -> None:
        plans = (plan for _, plan in candidate_plans(problem, name))
        self._rest = ((plan, _chunk_fates(problem, plan, 0, 0)) for plan in plans)
        self._plans: list[tuple[Plan, Table]] = []

    def __iter__(self) -> Iterator[tuple[Plan, Table]]:
        yield from self._plans
        for offer in self._rest:
            self._plans.append(offer)
            yield offer


def unsaid(entry: MethodEntry, problem: Problem) -> tuple[str, ...]:
    """The facts of a problem that a package has no options for. If the optimizer is in host memory,
    facts that have options but are not run here are included."""
    reasons: tuple[str, ...] = entry.cls.inexpressible(problem)
    return reasons if problem.system.host.optimizer_on_host else without_options(reasons)


class Engines:
    """The engines that can run plans of one problem: packages with options for an equal plan, and
    `ours`, the torch executor. `only`: the engine to check (empty: all)."""

    def __init__(self, problem: Problem, only: str = "") -> None:
        self.problem, self.only = problem, only
        self.offers: dict[str, Offers] = {}
        self.cache: dict[bytes, tuple[str, ...]] = {}
        for name, entry in baselines().items():
            if only in ("", name) and not unsaid(entry, problem):
                self.offers[name] = Offers(problem, name)

    def of(self, plan: Plan) -> tuple[str, ...]:
        key = msgspec.json.encode(replace(plan, fit={}))
        if key not in self.cache:
            first = _chunk_fates(self.problem, plan, 0, 0)
            names = [
                name
                for name, offers in self.offers.items()
                if any(self._same(plan, first, *offer) for offer in offers)
            ]
            if self.only in ("", "ours") and not refusals(self.problem, plan):
                names.append("ours")
            self.cache[key] = tuple(names)
        return self.cache[key]

    def legend(self) -> str:
        said = [
            f"{name[0].upper()} {name} "
            + (
                "(`flags` prints its options)"
                if name in self.offers
                else f"(not possible for this problem: "
                f"{'; '.join(entry.cls.inexpressible(self.problem))})"
            )
            for name, entry in baselines().items()
        ]
        return ", ".join([*said, "O our executor (`execute`)"])

    def _same(self, plan: Plan, first: Table, made: Plan, other: Table) -> bool:
        """Whether two plans are equal; `first` and `other`: their fates of rank 0's first chunk, in
        which most pairs of plans already differ."""
        if plan.partition != made.partition or first != other or _rest(plan, made, moved=False):
            return False
        return alike(self.problem, plan, made)


def _apart_bytes(fate: Resolved, counterpart: Resolved | None) -> int:
    """Bytes of a site that have a different fate in the other plan; 1 if the bytes agree and only
    `scope`, `whole` or `window` of a recomputation differs."""
    if counterpart is None:
        return fate.nbytes
    parts = ("keep_bytes", "offload_bytes", "recompute_bytes", "peer_bytes")
    moved = sum(abs(getattr(fate, part) - getattr(counterpart, part)) for part in parts) // 2
    return moved or int(fate != counterpart)


def offloads_any(table: Table) -> bool:
    return any(fate.offload_bytes for fate in table.values())


def _sites(wanted: Table, offered: Table) -> list[str]:
    """A line for each activation whose fates differ at some site, with the first such fates."""
    lines: dict[str, str] = {}
    for site, fate in wanted.items():
        other = offered.get(site)
        if other is not None and fate != other:
            lines.setdefault(site[-1], f"{site[-1]}: {_words(fate)} (nearest: {_words(other)})")
    return list(lines.values())


def _words(fate: Resolved) -> str:
    parts = {
        "kept": fate.keep_bytes,
        "offloaded": fate.offload_bytes,
        "recomputed": fate.recompute_bytes,
        "on other ranks": fate.peer_bytes,
    }
    alive = {name: nbytes for name, nbytes in parts.items() if nbytes}
    if len(alive) > 1:
        return " + ".join(f"{nbytes / fate.nbytes:.0%} {name}" for name, nbytes in alive.items())
    word = next(iter(alive), "kept")
    if word != "recomputed":
        return word
    whole = ", all of it" if fate.whole else ", in a window" if fate.window else ""
    return f"recomputed by {fate.scope if isinstance(fate.scope, str) else 'group'}{whole}"


def _rest(plan: Plan, candidate: Plan, moved: bool) -> list[str]:
    """A line for each difference of two plans other than fates. `moved`: whether bytes are
    offloaded, so that transfers count."""
    lines = [f"the {kind}" for kind in KINDS if getattr(plan, kind) != getattr(candidate, kind)]
    if moved and plan.transfers != candidate.transfers:
        lines.append(f"copies per {plan.transfers.granularity}, at times that the method sets")
    if any(rule.select.micro_batches is not None for rule in plan.rules):
        lines.append("a treatment of activations that changes between micro-batches")
    return lines
