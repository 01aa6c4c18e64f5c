"""The activations that a plan keeps on the device, which a composed method may still change."""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate
from typing import Literal

from msgspec.json import encode
from msgspec.structs import replace

from rematbench.costs.operators.ops import Part, rebuild_ops
from rematbench.engine.lowering.blocks.chunk_ops import ChunkFacts, ChunkOps
from rematbench.engine.lowering.blocks.fates import (
    ChunkPlace,
    Resolved,
    Site,
    covered,
    phased,
    resolve,
)
from rematbench.engine.lowering.lower import rank_orders
from rematbench.engine.lowering.plan_checks import shares_refusal
from rematbench.engine.lowering.rank_steps import pass_kinds
from rematbench.plan import Fate, Phase, Plan, Rule, Select, Share, Unsupported
from rematbench.problem import Problem
from rematbench.solve.search import smallest_feasible

KEPT = Resolved(1, 0, 0)

ChunkFates = tuple[ChunkOps, dict[Site, Resolved], frozenset[int]]

_RECENT: deque[tuple[Problem, bytes, bool, list[ChunkFates]]] = deque(maxlen=8)


def kept_activations(problem: Problem, plan: Plan, part: Part = "layer") -> frozenset[str]:
    """The saved activations of a part that the plan keeps whole at some site."""
    return _activations(problem, plan, part, lambda fate: not fate.changed)


def parted_activations(problem: Problem, plan: Plan, part: Part = "layer") -> frozenset[str]:
    """The saved activations of a part that the plan offloads or rebuilds in part at some site.
    Mini-sequences cannot do so with a piece."""
    return _activations(problem, plan, part, _parted)


def _activations(
    problem: Problem, plan: Plan, part: Part, wanted: Callable[[Resolved], bool]
) -> frozenset[str]:
    """The activations with a `wanted` fate at some site, among those that the model's backward
    needs (not those that a plan holds in addition)."""
    tables = {"embedding": (problem.embedding,), "head": (problem.head,)}
    saved = {name for table in tables.get(part, problem.layer_kinds) for name in table.saved}
    if not plan.rules:
        return frozenset(saved) if wanted(KEPT) else frozenset()
    found: set[str] = set()
    for _, fates, _ in resolved(problem, plan):
        for (where, _, name), fate in fates.items():
            if where == part and name in saved and name not in found and wanted(fate):
                found.add(name)
    return frozenset(found)


def overruled(problem: Problem, base: Plan, plan: Plan) -> str:
    """The name of a layer's activation whose fate in `base` the `plan` overrides; "rules" if `plan`
    changes the rules of its base; empty if it does neither. Embedding and head are exempt, because
    pieces of the head rebuild the loss on every base."""
    if plan.rules[: len(base.rules)] != base.rules:
        return "rules"
    for ops, phase, micro_batch in _kinds_of_chunks(problem, plan):
        before, _ = ops.fates(base, phase, micro_batch)
        after, _ = ops.fates(plan, phase, micro_batch)
        for site, fate in before.items():
            if site[0] == "layer" and fate.changed and after[site] != fate:
                return site[2]
    return ""


def holding_inputs(problem: Problem, base: Plan, dropped: Collection[str], whole: bool) -> Plan:
    """The base, changed to hold layer inputs if recomputing the `dropped` activations (or `whole`
    layers) starts from an input that is not saved.  Stacks with eager norms save no layer input,
    because these norms save copies."""
    rest = kept_activations(problem, base) - set(dropped)
    for table in problem.layer_kinds:
        wanted = frozenset(dropped) & table.activations.keys()
        again = table.ops if whole else rebuild_ops(table, wanted, rest)
        if "layer_input" not in table.saved and any("layer_input" in op.inputs for op in again):
            return replace(base, held=tuple(dict.fromkeys((*base.held, "layer_input"))))
    return base


def with_live_rules(problem: Problem, base: Plan, *rules: Rule) -> Plan:
    """The base with those of the rules that match a site. A rule without a matching site is an
    error in lowering, but here it means that the base keeps none of the rule's activations."""
    plan = base.with_rules(*rules)
    if not base.rules:
        return plan
    live: set[int] = set()
    for _, _, matched in resolved(problem, plan):
        live |= matched
    first = len(base.rules)
    return base.with_rules(*(r for index, r in enumerate(rules, first) if index in live))


def rule_of(names: tuple[str, ...], fate: Fate, layers: tuple[int, ...] | None = None) -> Rule:
    """The rule that gives kept activations of these names a fate, in `layers` (None: in all)."""
    return Rule(Select(parts=("layer",), layers=layers, activations=names, kept=True), fate)


def sharing_inputs(
    problem: Problem, plan: Plan, layers: tuple[int, ...], home: Literal["device", "host"]
) -> Plan | Unsupported:
    """The plan whose tensor-parallel ranks share out the kept inputs of `layers` (empty: all)."""
    share = Share(problem.layout.tp, home)
    made = plan.with_rules(rule_of(("layer_input",), share, layers or None))
    refused = shares_refusal(made, problem.layout)
    return Unsupported(refused) if refused else made


def smallest_fitting(problem: Problem, at: Callable[[int], Plan], top: int) -> int | None:
    """The smallest n in [0, top] for which the plan `at(n)` fits; None if no plan fits."""
    return smallest_feasible(lambda n: problem.cost.headroom_bytes(at(n)), top)


def no_offload(problem: Problem) -> str:
    """Why the stack cannot offload activations; empty if it can."""
    if "activation_offload" in problem.system.accepts.features:
        return ""
    return f"system {problem.system.name} has no activation offload"


def refused_in_pieces(problem: Problem, plan: Plan) -> str:
    """Why a plan cannot offload or split a tensor of a mini-sequence, whose pieces can only be kept
    or rebuilt; empty if it does not."""
    for ops, fates, _ in resolved(problem, plan) if plan.mini_sequences else ():
        for unit in ops.units:
            for name, _, site in ops.saved(unit):
                fate = fates[site]
                if _parted(fate) and ops.run_of(unit, name):
                    return (
                        f"the base computes {name} in mini-sequences, whose pieces are not "
                        "offloaded (name the offloading method before the mini-sequence method)"
                    )
    return ""


def _parted(fate: Resolved) -> bool:
    return fate.mixed or fate.offload_bytes > 0


def resolved(problem: Problem, plan: Plan, *, apart: bool = False) -> list[ChunkFates]:
    """The fates and the matching rules of every chunk in each of its phases, as lowering resolves
    them.  Equal chunks and phases occur once; with `apart` every chunk occurs.  Recent results are
    cached, because methods call this repeatedly for one plan."""
    content = encode(replace(plan, fit={}))
    for cached_problem, cached_plan, cached_apart, found in _RECENT:
        if cached_problem is problem and cached_apart == apart and cached_plan == content:
            return found
    found = [
        (ops, *ops.fates(plan, phase, micro_batch))
        for ops, phase, micro_batch in _kinds_of_chunks(problem, plan, apart)
    ]
    _RECENT.append((problem, content, apart, found))
    return found


def _kinds_of_chunks(
    problem: Problem, plan: Plan, apart: bool = False
) -> Iterator[tuple[ChunkOps, Phase, int]]:
    """(chunk, phase, micro-batch) of every chunk in each of its phases.  Chunks and phases with
    equal fates (all phases, if no rule names a phase) occur once; with `apart` every chunk
    occurs."""
    windows = tuple(w for rule in plan.rules if (w := rule.select.micro_batches) is not None)
    seen: set[object] = set()
    apart_by_phase = phased(plan.rules)
    ends = (0, 0), (plan.head_rank, len(plan.partition[-1]) - 1)
    for rank, order in enumerate(rank_orders(plan, problem)):
        made: dict[int, ChunkOps] = {}
        alike = [
            (rank, chunk) if apart else _alike(problem, plan, rank, chunk, ends)
            for chunk in range(len(plan.partition[rank]))
        ]
        for kind, item in pass_kinds(order, windows).items():
            key = (alike[kind.chunk], kind.phase if apart_by_phase else "", kind.inside)
            if key in seen:
                continue
            seen.add(key)
            if kind.chunk not in made:
                layers = plan.partition[rank][kind.chunk]
                where = (problem, rank, kind.chunk, layers)
                made[kind.chunk] = ChunkOps.of(*where, ChunkFacts.of(plan))
            yield made[kind.chunk], kind.phase, item.micro_batch


def _alike(
    problem: Problem, plan: Plan, rank: int, chunk: int, ends: Collection[tuple[int, int]]
) -> object:
    layers = plan.partition[rank][chunk]
    reached = covered(plan.rules, ChunkPlace(stage=rank, chunk=chunk, layers=layers))
    at_end = [(rank, chunk) == end for end in ends]
    at_end.append(chunk * len(plan.partition) + rank + 1 in plan.cuts)
    return (*at_end, tuple(map(problem.variant, layers)), reached)


def resident_bytes(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """A lower bound of each rank's activation peak: the bytes of layers' tensors that the plan
    keeps on the device when the most passes are between their forward and their backward."""
    kept: dict[tuple[int, int], int] = {}
    for ops, fates, _ in resolved(problem, plan, apart=True):
        stays = sum(fate.keep_bytes for site, fate in fates.items() if site[0] == "layer")
        key = (ops.sites.stage, ops.sites.chunk)
        kept[key] = min(stays, kept.get(key, stays))
    found = []
    share = (
        min(plan.slices) / sum(plan.slices) if plan.slices else 1
    )  # A pass keeps at least the smallest slice.
    for rank, order in enumerate(rank_orders(plan, problem)):
        live = accumulate((p.forward - p.last) * kept[rank, p.chunk] for p in order)
        found.append(int(share * max(live, default=0)))
    return tuple(found)


def kept_layer_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes that the layers of the first chunk keep for one micro-batch, counting only tensors with
    a gradient (no row statistics, no masks), as published formulas do."""
    ops = ChunkOps.of_plan(problem, plan, 0, 0)
    fates, _ = resolve(plan, ops.sites, "warmup", 0)
    tensors = ops.sites.sites
    return sum(
        tensors[site].nbytes
        for site, fate in fates.items()
        if site[0] == "layer" and not fate.changed and tensors[site].differentiable
    )
