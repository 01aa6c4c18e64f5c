"""A plan as the options of a baseline: the policy whose plan decides the same, or what is missing.

Equal means: every saved tensor of every chunk has the same fate in bytes, in every phase, and the
order, partition, states, mini-sequences and kind of transfers are the same.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rematbench.choose.outcome import run_plan
from rematbench.lowering.chunk_ops import ChunkOps
from rematbench.lowering.fates import PHASES, Resolved, resolve
from rematbench.packages.process import baselines
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.problem import Problem
from rematbench.runs.executable import refusals

Table = dict[tuple[Any, ...], Resolved]
KINDS = ("partition", "schedule", "orders", "states", "mini_sequences", "held")


class Answer(Struct, frozen=True, kw_only=True):
    """A baseline's options for a plan, or those of its nearest policy, whose plan this is, and
    (`missing`) what that does otherwise."""

    baseline: str
    settings: dict[str, Any] = {}
    flags: str = ""
    missing: tuple[str, ...] = ()
    plan: Plan | None = None


class Costs(Struct, frozen=True, kw_only=True):
    """What a plan costs beside another: bytes of the largest peak, the step's change as a share,
    and what it leaves of the device (negative: it does not fit)."""

    peak_bytes: int
    step_share: float
    headroom_bytes: int


def costs(problem: Problem, plan: Plan, other: Plan) -> Costs | None:
    """What the `other` plan costs beside a plan; None where it cannot be lowered."""
    try:
        mine, found = run_plan(problem, plan), run_plan(problem, other)
    except PlanError:
        return None
    assert mine.evaluation is not None
    assert found.evaluation is not None
    assert found.verdict is not None
    there, here = found.evaluation.peak_device_bytes, mine.evaluation.peak_device_bytes
    return Costs(
        peak_bytes=max(there) - max(here),
        step_share=found.evaluation.step_s / mine.evaluation.step_s - 1,
        headroom_bytes=found.verdict.headroom_bytes,
    )


def flags_of(problem: Problem, plan: Plan, baseline: str) -> Answer:
    """The baseline's policy equal to a plan; else the nearest one (of the fewest bytes that fare
    otherwise) with the differences named, and what of the problem the baseline cannot say."""
    wanted = fates(problem, plan)
    unsaid: tuple[str, ...] = baselines()[baseline].cls.unsaid(problem)
    nearest: tuple[int, Answer] | None = None
    for candidate, made in offered(problem, baseline):
        found = fates(problem, made)
        otherwise = sum(_apart_bytes(fate, found.get(site)) for site, fate in wanted.items())
        missing = (*_sites(wanted, found), *_rest(plan, made, any_moved(wanted)), *unsaid)
        answer = Answer(
            baseline=baseline,
            settings={f: getattr(candidate, f) for f in candidate.__struct_fields__},
            flags=candidate.flags(problem),
            missing=missing,
            plan=made,
        )
        if len(missing) == len(unsaid):
            return answer
        if nearest is None or otherwise < nearest[0]:
            nearest = otherwise, answer
    return nearest[1] if nearest else Answer(baseline=baseline, missing=unsaid)


def offered(problem: Problem, baseline: str) -> Iterator[tuple[Any, Plan]]:
    """Every policy of a baseline that has a plan for a problem, and that plan."""
    for candidate in baselines()[baseline].cls.candidates(problem):
        made = candidate.plan(problem, problem.base_plan)
        if not isinstance(made, Unsupported):
            yield candidate, made


def fates(problem: Problem, plan: Plan) -> Table:
    """The fate of every site: (rank, chunk, phase, part, layer, activation)."""
    table: Table = {}
    for rank, chunks in enumerate(plan.partition):
        for chunk in range(len(chunks)):
            table |= _chunk_fates(problem, plan, rank, chunk)
    return table


def _chunk_fates(problem: Problem, plan: Plan, rank: int, chunk: int) -> Table:
    table: Table = {}
    sites = ChunkOps(problem, rank, chunk, plan.partition[rank][chunk]).sites
    for phase in PHASES:
        found, _ = resolve(plan, sites, phase, 0)
        table |= {(rank, chunk, phase, *site): _plain(fate) for site, fate in found.items()}
    return table


def _plain(fate: Resolved) -> Resolved:
    """A fate without the words that mean nothing where no byte is rebuilt."""
    if fate.recompute_bytes:
        return fate
    return Resolved(fate.keep_bytes, fate.offload_bytes, 0)


class Offers:
    """The plans of a package's policies with the fates of their first chunk, each made when it is
    asked for."""

    def __init__(self, problem: Problem, name: str) -> None:
        self._problem = problem
        self._rest = offered(problem, name)
        self._made: list[tuple[Plan, Table]] = []

    def __iter__(self) -> Iterator[tuple[Plan, Table]]:
        """All of them, simplest first."""
        for at in count():
            if at == len(self._made):
                more = next(self._rest, None)
                if more is None:
                    return
                self._made.append((more[1], _first(self._problem, more[1])))
            yield self._made[at]


class Engines:
    """Which engines can run plans of one problem: packages that have options equal to a plan, and
    `ours`, the torch executor; `only` one of them, where that is all that is asked."""

    def __init__(self, problem: Problem, only: str = "") -> None:
        self.problem, self.only = problem, only
        self.offers: dict[str, Offers] = {}
        self.found: dict[bytes, tuple[str, ...]] = {}
        for name, entry in baselines().items():
            if only in ("", name) and not entry.cls.unsaid(problem):
                self.offers[name] = Offers(problem, name)

    def of(self, plan: Plan) -> tuple[str, ...]:
        """The engines' names."""
        key = msgspec.json.encode(replace(plan, fit={}))
        if key not in self.found:
            mine = (plan, _first(self.problem, plan))
            names = [
                name
                for name, offers in self.offers.items()
                if any(self._same(mine, offer) for offer in offers)
            ]
            if self.only in ("", "ours") and not refusals(self.problem, plan):
                names.append("ours")
            self.found[key] = tuple(names)
        return self.found[key]

    def legend(self) -> str:
        """What the initials of the engines stand for, and why a package is none here."""
        said = [
            f"{name[0].upper()} {name} "
            + (
                "(`flags` prints its options)"
                if name in self.offers
                else f"(none here: {'; '.join(entry.cls.unsaid(self.problem))})"
            )
            for name, entry in baselines().items()
        ]
        return ", ".join([*said, "O our executor (`execute`)"])

    def _same(self, mine: tuple[Plan, Table], offer: tuple[Plan, Table]) -> bool:
        """Whether two plans decide the same."""
        (plan, first), (made, other) = mine, offer
        if plan.partition != made.partition or first != other or _rest(plan, made, moved=False):
            return False
        wanted = fates(self.problem, plan)
        return wanted == fates(self.problem, made) and not _rest(plan, made, any_moved(wanted))


def _first(problem: Problem, plan: Plan) -> Table:
    """The fates of one chunk, which tell most pairs of plans apart."""
    return _chunk_fates(problem, plan, 0, 0)


def _apart_bytes(fate: Resolved, other: Resolved | None) -> int:
    """Bytes of a site that fare otherwise there."""
    if other is None:
        return fate.nbytes
    parts = ("keep_bytes", "offload_bytes", "recompute_bytes")
    moved = sum(abs(getattr(fate, part) - getattr(other, part)) for part in parts) // 2
    return moved or int(fate != other)


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
    whole = ", all of it" if fate.whole else ", in a window" if fate.window else ""
    return f"recomputed by {fate.scope if isinstance(fate.scope, str) else 'group'}{whole}"


def _rest(plan: Plan, made: Plan, moved: bool) -> list[str]:
    """Everything else that a plan decides."""
    lines = [f"{kind} of its own" for kind in KINDS if getattr(plan, kind) != getattr(made, kind)]
    if moved and plan.transfers != made.transfers:
        lines.append(f"copies per {plan.transfers.granularity} as the method times them")
    if any(rule.select.micro_batches is not None for rule in plan.rules):
        lines.append("fates that change between micro-batches")
    return lines
