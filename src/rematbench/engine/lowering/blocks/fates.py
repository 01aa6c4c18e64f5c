"""Resolves a plan's rules into the exact fate, in bytes, of each saved tensor of a chunk."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from rematbench.costs.operators.ops import Activation, Part
from rematbench.plan import (
    ByteBudget,
    Fate,
    Group,
    Keep,
    Offload,
    Phase,
    Plan,
    PlanError,
    Recompute,
    Rule,
    Scope,
    Select,
    Share,
    Split,
    Window,
)

PHASES: tuple[Phase, ...] = ("warmup", "steady", "cooldown")
Site = tuple[Part, int, str]
"""(part, layer index inside the chunk, activation); embedding and head use layer 0."""


class Resolved(Struct, frozen=True, array_like=True, gc=False):
    """The fate of a saved tensor: the bytes that are kept, offloaded and rebuilt, and those that
    other ranks have (`peer_bytes`)."""

    keep_bytes: int
    offload_bytes: int
    recompute_bytes: int
    scope: Scope | Group = "consumer"
    whole: bool = False
    window: Window | None = None
    peer_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.keep_bytes + self.offload_bytes + self.recompute_bytes + self.peer_bytes

    @property
    def changed(self) -> bool:
        return self.keep_bytes < self.nbytes

    @property
    def mixed(self) -> bool:
        """Whether the tensor has more than one fate, so that its storage is in parts."""
        parts = self.keep_bytes, self.offload_bytes, self.recompute_bytes, self.peer_bytes
        return sum(part > 0 for part in parts) > 1


Fates = dict[Site, Resolved]


class ChunkPlace(Struct, frozen=True, kw_only=True):
    stage: int
    chunk: int
    layers: tuple[int, ...]


class ChunkSites(ChunkPlace, frozen=True, kw_only=True):
    sites: dict[Site, Activation]


def _matched(select: Select, where: ChunkSites, phase: Phase, micro_batch: int) -> list[Site]:
    window, parts, names = select.micro_batches, select.parts, select.activations
    if select.phases is not None and phase not in select.phases:
        return []
    if not _reaches(select, where) or not (window is None or window[0] <= micro_batch < window[1]):
        return []
    if select.layers is None:
        own: Sequence[Site] = [*where.sites]
    else:
        inside = {i for i, layer in enumerate(where.layers) if layer in select.layers}
        own = [site for site in where.sites if site[0] == "layer" and site[1] in inside]
    return [
        site
        for site in own
        if (parts is None or site[0] in parts) and (names is None or site[2] in names)
    ]


def resolve(
    plan: Plan, where: ChunkSites, phase: Phase, micro_batch: int
) -> tuple[dict[Site, Resolved], frozenset[int]]:
    """Return the fates of a chunk's sites, and the indices of all rules that matched a site.  Raise
    PlanError for groups that overlap or do not contain their site."""
    winner, matched = _winners(plan.rules, where, phase, micro_batch)
    fates: list[Fate] = [*(rule.fate for rule in plan.rules), Keep()]
    shared = [isinstance(fate, ByteBudget) for fate in fates]
    table: dict[Site, Resolved] = {}
    budgets: dict[int, list[Site]] = {}
    known: dict[tuple[int, int], Resolved] = {}  # Equal layers share their tensors.
    shard_rows = min((tensor.rows for tensor in where.sites.values()), default=1)
    for site, tensor in where.sites.items():
        index = winner.get(site, -1)
        if shared[index]:
            budgets.setdefault(index, []).append(site)
            continue
        key = (index, id(tensor))
        if key not in known:
            known[key] = _exact(fates[index], tensor, shard_rows)
        table[site] = known[key]
    for index, sites in budgets.items():
        budget = plan.rules[index].fate
        assert isinstance(budget, ByteBudget)
        table |= _spend(budget, {site: where.sites[site] for site in sites})
    if any(isinstance(f, Recompute | Split) and isinstance(f.scope, Group) for f in fates):
        _check_groups(where, table)
    if budgets:
        table = {site: table[site] for site in where.sites}
    return table, frozenset(matched)


def _winners(
    rules: Sequence[Rule], where: ChunkSites, phase: Phase, micro_batch: int
) -> tuple[dict[Site, int], set[int]]:
    """The index of the last rule that matches each site, and the indices of all matching rules."""
    winner: dict[Site, int] = {}
    matched: set[int] = set()
    for index, rule in enumerate(rules):
        hit = _matched(rule.select, where, phase, micro_batch)
        if rule.select.kept:
            hit = [s for s in hit if s not in winner or isinstance(rules[winner[s]].fate, Keep)]
        winner.update(dict.fromkeys(hit, index))
        if hit:
            matched.add(index)
    return winner, matched


def phased(rules: Sequence[Rule]) -> bool:
    """Whether any rule selects phases.  If none does, all phases have the same fates."""
    return any(rule.select.phases is not None for rule in rules)


def _reaches(select: Select, where: ChunkPlace) -> bool:
    """Whether a selector can match a site of the chunk (a quick test before the full one)."""
    return (
        (select.stages is None or where.stage in select.stages)
        and (select.chunks is None or where.chunk in select.chunks)
        and (select.layers is None or not set(where.layers).isdisjoint(select.layers))
    )


def covered(rules: Sequence[Rule], where: ChunkPlace) -> tuple[tuple[int, ...] | None, ...]:
    """Return, for each rule, the layers of the chunk that the rule's stages, chunks and layers
    select: (-1,) if the rule does not select layers, None if it does not reach the chunk.

    Chunks of equal shape for which this result is equal have equal fates in a phase.
    """
    found: list[tuple[int, ...] | None] = []
    for rule in rules:
        select = rule.select
        if not _reaches(select, where):
            found.append(None)
        elif select.layers is None:
            found.append((-1,))
        else:
            inside = [i for i, layer in enumerate(where.layers) if layer in select.layers]
            found.append(tuple(inside))
    return tuple(found)


def _exact(fate: Fate, tensor: Activation, shard_rows: int) -> Resolved:
    whole = tensor.nbytes
    match fate:
        case Keep():
            return Resolved(whole, 0, 0)
        case Offload():
            return Resolved(0, whole, 0)
        case Recompute():
            return Resolved(0, 0, whole, fate.scope, fate.whole, fate.window)
        case Share():
            if tensor.rows % fate.ranks:
                words = f"{fate.ranks} ranks cannot share {tensor.rows} rows evenly"
                raise PlanError(f"{tensor.name}: {words}")
            part, away = whole // fate.ranks, fate.home == "host"
            return Resolved(part * (not away), part * away, 0, peer_bytes=whole - part)
        case Split():
            if fate.offload + fate.recompute > 1.0:
                raise PlanError(
                    f"{tensor.name}: offload {fate.offload} + recompute {fate.recompute} exceed 1"
                )
            row_bytes = tensor.nbytes // shard_rows  # A row is a token of the shard.
            off = int(shard_rows * fate.offload + 1e-9) * row_bytes
            rebuilt = int(shard_rows * fate.recompute + 1e-9) * row_bytes
            _require_blocks(tensor, shard_rows, off // row_bytes, rebuilt // row_bytes)
            return Resolved(whole - off - rebuilt, off, rebuilt, fate.scope)
        case ByteBudget():
            raise AssertionError("a byte budget is spent over a chunk (`_spend`)")


def _require_blocks(tensor: Activation, rows: int, *parts: int) -> None:
    """Raise PlanError unless each part of a quantised tensor (in rows of the shard) consists of
    whole blocks of rows, because each block has its own scales."""
    block = tensor.block_rows * rows // tensor.rows or tensor.block_rows
    if any(part % (block or rows) for part in parts):
        own = f"one scale for every {block} rows" if block else "one scale for all rows"
        raise PlanError(
            f"{tensor.name} has {own}: keep, offload or rebuild rows with a common scale together"
        )


def _check_groups(where: ChunkSites, table: Mapping[Site, Resolved]) -> None:
    """Raise PlanError unless each site in a group lies in the group's layers and no groups overlap.
    A group is rebuilt once, before the backward of its last layer, so a layer in two groups would
    be rebuilt too late for one of them or too early for the other."""
    groups: set[Group] = set()
    for (part, index, name), fate in table.items():
        if not (fate.recompute_bytes and isinstance(fate.scope, Group)):
            continue
        layer = where.layers[index] if part == "layer" else None
        if layer is None or not fate.scope.first <= layer <= fate.scope.last:
            site = part if layer is None else f"layer {layer}"
            raise PlanError(
                f"{name} of {site} is rebuilt with {fate.scope}, which does not contain it"
            )
        groups.add(fate.scope)
    for group, after in pairwise(sorted(groups, key=lambda group: (group.first, group.last))):
        if after.first <= group.last:
            raise PlanError(f"{group} and {after} overlap: a layer is rebuilt with one group only")


def _spend(budget: ByteBudget, sites: Mapping[Site, Activation]) -> dict[Site, Resolved]:
    """The fates under a byte budget: the largest tensors are offloaded first. Tensors of equal size
    stay in order, so that the result is deterministic."""
    eligible = [site for site, tensor in sites.items() if tensor.nbytes >= budget.min_bytes]
    total = sum(sites[site].nbytes for site in eligible)
    wanted = -(-int(total * budget.alpha) // budget.granularity) * budget.granularity
    left = min(wanted, total)
    table = {site: Resolved(tensor.nbytes, 0, 0) for site, tensor in sites.items()}
    for site in sorted(eligible, key=lambda s: -sites[s].nbytes):
        taken = min(left, sites[site].nbytes)
        table[site] = Resolved(sites[site].nbytes - taken, taken, 0)
        left -= taken
    return table
