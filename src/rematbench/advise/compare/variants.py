"""The best settings of the methods' grids, where the defaults do not fit or are slower.

Every value of every grid is declared, so variants are a list, and most of them need not be made.
Two assumptions decide (a test holds them against whole lists): a plan is not faster than the plan
that its last method was added to; pieces only cost time and only free bytes. So what is made of a
plan slower than one that fits is not made, with pieces or without. A composition may be faster
than its later methods alone: what one rebuilds the next need not copy.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from rematbench.advise.compare.candidates import (
    KINDS,
    Candidate,
    Made,
    composed,
    compositions,
    place,
)
from rematbench.advise.compare.entry import Entry, as_made
from rematbench.evaluate.lowered import same_plan
from rematbench.plan import Plan, Settings
from rematbench.plugins.registry import MethodEntry, Registry, typed
from rematbench.problem import Problem
from rematbench.solve.kept import resident_bytes

Ask = Callable[[Sequence[Candidate]], list[Entry]]
"""Makes candidates; the entries come in the order of the candidates."""

BATCH = 4
"""Candidates made between two looks at the fastest step. The number is a constant, so that the
choice of what is made does not depend on the number of processes."""

WORTH = 0.995
"""A variant is made where its step may take this share of the fastest step or less. No comparison
tells plans apart that differ by less than half a per cent."""

PIECES = KINDS.index("pieces")


class Wanted(Struct, frozen=True):
    """A candidate, and a lower bound of its step in seconds."""

    candidate: Candidate
    least_s: float


def best_variants(
    problem: Problem,
    registry: Registry,
    base: Plan,
    most: int,
    known: Sequence[Entry],
    ask: Ask,
) -> list[Entry]:
    """For each combination of methods the fastest variant that beats the known entries.

    A variant fits and leaves the reserve free; where no variant of a combination leaves the reserve
    free, any that fits will do. Where nothing fits at all, the result is the variant with the
    fewest missing bytes. `known`: entries of methods, policies and compositions at their defaults;
    `most` methods are composed.
    """
    grids = _Grids(registry, base, known, ask, problem.reserve_bytes)
    grids.make_without_pieces(most - 1)
    grids.make_in_pieces(problem)
    made = [entry for entry in grids.entries if entry.candidate.origin == "grid"]
    fastest: dict[tuple[str, ...], Entry] = {}
    fitting = [entry for entry in (*known, *made) if entry.status == "ok"]
    for entry in sorted(fitting, key=lambda e: (not grids.roomy(e), e.step_s)):
        fastest.setdefault(entry.candidate.methods, entry)
    chosen = [entry for entry in fastest.values() if entry.candidate.origin == "grid"]
    if made and not fastest:
        leanest = min(made, key=_short_bytes)
        better = all(_short_bytes(leanest) < _short_bytes(entry) for entry in known)
        chosen = [leanest] if better else []
    return [replace(e, candidate=replace(e.candidate, origin="variant")) for e in chosen]


def _short_bytes(entry: Entry) -> int:
    """Missing bytes of device or host, the larger of both; negative where the entry fits."""
    if entry.verdict is None:
        return entry.reserved_bytes
    return -min(entry.verdict.headroom_bytes, entry.verdict.host_headroom_bytes)


class _Grids:
    """Variants of one problem. `limit_s`: a variant is made only if its step can be shorter."""

    def __init__(
        self, registry: Registry, base: Plan, known: Sequence[Entry], ask: Ask, reserve_bytes: int
    ) -> None:
        self.registry, self.base, self.ask = registry, base, ask
        self.reserve_bytes = reserve_bytes
        self.entries: list[Entry] = []
        self.limit_s = float("inf")
        self._learn(known)
        self.known = {entry.name: entry for entry in known if entry.plan is not None}
        alone = [e for e in self.known.values() if e.candidate.origin == "method"]
        self.least_s = min((entry.step_s for entry in alone), default=0.0)
        places = {e.name: place(kinds) for e in alone if (kinds := as_made(base, e).kinds)}
        self.whole = [name for name, where in places.items() if where != PIECES]
        self.cutters = [name for name, where in places.items() if where == PIECES]

    def make_without_pieces(self, most: int) -> None:
        """Make methods at their defaults and in their grids, alone and composed, without pieces."""
        values = (
            _variant(self.registry.methods[name], settings)
            for name in self.whole
            for settings in self.registry.methods[name].grid
        )
        self._make(Wanted(one, self.least_s) for one in values if one.name not in self.known)
        alone = [self.known[name] for name in self.whole]
        alone += [entry for entry in self.entries if len(entry.candidate.methods) == 1]
        singles = [as_made(self.base, entry) for entry in alone]
        self.entries += [self.known[name] for name in self.whole]
        for count in range(2, most + 1):
            groups = [group for group in compositions(singles, count) if len(group) == count]
            self._make(wanted for group in groups if (wanted := self._on_base(group)))

    def make_in_pieces(self, problem: Problem) -> None:
        """Make each short plan in pieces: the first value of each grid of pieces that fits. Plans
        qualify that are short of device bytes, may be faster than what fits, and do not keep more
        than the device has; the fastest plan comes first."""
        short = [e for e in self.entries if e.plan and not self.roomy(e)]
        short = [e for e in short if e.step_s < self.limit_s and not keeps_too_much(problem, e)]
        short = list({same_plan(e.plan): e for e in reversed(short) if e.plan}.values())
        short.sort(key=lambda entry: (entry.step_s, entry.name))
        for name in self.cutters:
            method = self.registry.methods[name]
            if not method.grid:
                continue
            if not (self.limit_s < float("inf") and self._base_keeps_too_much(problem)):
                self._make([Wanted(_variant(method, {}, method.grid), self.least_s)])
            self._make(Wanted(_in_pieces(entry, method), entry.step_s) for entry in short)

    def _base_keeps_too_much(self, problem: Problem) -> bool:
        """Whether the base fits in no number of pieces; False where its bytes are not known."""
        idle = same_plan(self.base)
        plans = (e for e in self.known.values() if e.plan and same_plan(e.plan) == idle)
        return any(keeps_too_much(problem, entry) for entry in plans)

    def _on_base(self, group: tuple[Made, ...]) -> Wanted | None:
        """The candidate of a group's last method on the plan of the others, with a lower bound;
        None where it is known or the others have no plan."""
        made = {entry.name: entry for entry in self.entries} | self.known
        before = made.get("+".join(one.candidate.name for one in group[:-1]))
        if before is None or before.plan is None:
            return None
        candidate = replace(composed(group, before.plan), origin="grid")
        return None if candidate.name in self.known else Wanted(candidate, before.step_s)

    def _make(self, wanted: Iterable[Wanted]) -> None:
        """Make, batch by batch, the wanted candidates that may be fast enough."""
        waiting = list(wanted)
        while waiting:
            batch = [one.candidate for one in waiting[:BATCH] if one.least_s < self.limit_s]
            waiting = waiting[BATCH:]
            entries = [e for e in self.ask(batch) if e.plan is not None and not e.clash]
            self._learn(entries)
            self.entries += entries

    def roomy(self, entry: Entry) -> bool:
        """Whether the entry leaves the reserve of device bytes free."""
        return entry.verdict is not None and entry.verdict.headroom_bytes >= self.reserve_bytes

    def _learn(self, entries: Iterable[Entry]) -> None:
        fitting = [entry for entry in entries if entry.status == "ok" and self.roomy(entry)]
        steps = [WORTH * entry.step_s for entry in fitting]
        self.limit_s = min([self.limit_s, *steps])


def keeps_too_much(problem: Problem, entry: Entry) -> bool:
    """Whether states and kept tensors alone exceed the device, computed in pieces or not."""
    assert entry.plan is not None
    assert entry.evaluation is not None
    kept = resident_bytes(problem, entry.plan)
    ranks = entry.evaluation.ranks
    states = [rank.parameter + rank.gradient + rank.optimizer for rank in ranks]
    return any(a + b > problem.usable_bytes for a, b in zip(kept, states, strict=True))


def _variant(
    method: MethodEntry, settings: Settings, choices: tuple[Settings, ...] = ()
) -> Candidate:
    """A method with settings of its grid, or with the first of `choices` that fits."""
    return Candidate(
        name=typed(method, settings),
        origin="grid",
        methods=(method.name,),
        method=method.name,
        settings=dict(settings),
        first_that_fits=choices,
    )


def _in_pieces(entry: Entry, method: MethodEntry) -> Candidate:
    """The candidate of an entry's plan, computed in the fewest pieces that fit."""
    cut = _variant(method, {}, method.grid)
    return replace(
        cut,
        name=f"{entry.name}+{method.name}",
        methods=(*entry.candidate.methods, method.name),
        base=entry.plan,
    )
