"""A plan as the options of a baseline: the policy whose plan decides the same, or what is missing.

Equal means: every saved tensor of every chunk has the same fate in bytes, in every phase, and the
order, partition, states, mini-sequences and kind of transfers are the same.
"""

from typing import Any

from msgspec import Struct

from rematbench.lowering.chunk_ops import ChunkOps
from rematbench.lowering.fates import PHASES, Resolved, resolve
from rematbench.packages.process import baselines
from rematbench.plan import Plan, Unsupported
from rematbench.problem import Problem

Table = dict[tuple[Any, ...], Resolved]
KINDS = ("partition", "schedule", "orders", "states", "mini_sequences", "held")


class Answer(Struct, frozen=True, kw_only=True):
    """A baseline's options for a plan, or (`missing`) what its nearest policy does otherwise."""

    baseline: str
    settings: dict[str, Any]
    flags: str
    missing: tuple[str, ...] = ()


def flags_of(problem: Problem, plan: Plan, baseline: str) -> Answer:
    """The baseline's policy equal to a plan; else the nearest one with the differences named, and
    what of the problem itself the baseline cannot say."""
    wanted = fates(problem, plan)
    policies = baselines()[baseline].cls
    unsaid: tuple[str, ...] = policies.unsaid(problem)
    nearest: Answer | None = None
    fewest = -1
    for candidate in policies.candidates(problem):
        made = candidate.plan(problem, problem.base_plan)
        if isinstance(made, Unsupported):
            continue
        found = fates(problem, made)
        count = sum(wanted[site] != found.get(site) for site in wanted)
        missing = (*_sites(wanted, found), *_rest(plan, made, any_moved(wanted)), *unsaid)
        settings = {f: getattr(candidate, f) for f in candidate.__struct_fields__}
        answer = Answer(
            baseline=baseline,
            settings=settings,
            flags=candidate.flags(problem),
            missing=missing,
        )
        if len(missing) == len(unsaid):
            return answer
        if nearest is None or count < fewest:
            nearest, fewest = answer, count
    return nearest or Answer(baseline=baseline, settings={}, flags="", missing=unsaid)


def fates(problem: Problem, plan: Plan) -> Table:
    """The fate of every site: (rank, chunk, phase, part, layer, activation)."""
    table: Table = {}
    for rank, chunks in enumerate(plan.partition):
        for chunk, layers in enumerate(chunks):
            sites = ChunkOps(problem, rank, chunk, layers).sites
            for phase in PHASES:
                found, _ = resolve(plan, sites, phase, 0)
                table |= {(rank, chunk, phase, *site): fate for site, fate in found.items()}
    return table


def any_moved(table: Table) -> bool:
    """Whether anything leaves the device."""
    return any(fate.offload_bytes for fate in table.values())


def _sites(wanted: Table, found: Table) -> list[str]:
    """One line per activation whose fate differs anywhere."""
    lines: dict[str, str] = {}
    for site, fate in wanted.items():
        other = found.get(site)
        if other is not None and fate != other:
            lines.setdefault(site[-1], f"{site[-1]}: {_words(fate)} (there: {_words(other)})")
    return list(lines.values())


def _words(fate: Resolved) -> str:
    parts = {
        "kept": fate.keep_bytes,
        "offloaded": fate.offload_bytes,
        "recomputed": fate.recompute_bytes,
    }
    alive = {name: nbytes for name, nbytes in parts.items() if nbytes}
    if len(alive) > 1:
        return " + ".join(f"{nbytes / fate.nbytes:.0%} {name}" for name, nbytes in alive.items())
    word = next(iter(alive), "kept")
    if word != "recomputed":
        return word
    whole = ", all of it" if fate.whole else ""
    return f"recomputed by {fate.scope if isinstance(fate.scope, str) else 'group'}{whole}"


def _rest(plan: Plan, made: Plan, moved: bool) -> list[str]:
    """Everything else that a plan decides."""
    lines = [f"{kind} of its own" for kind in KINDS if getattr(plan, kind) != getattr(made, kind)]
    if moved and plan.transfers != made.transfers:
        lines.append(f"copies per {plan.transfers.granularity} as the method times them")
    if any(rule.select.micro_batches is not None for rule in plan.rules):
        lines.append("fates that change between micro-batches")
    return lines
