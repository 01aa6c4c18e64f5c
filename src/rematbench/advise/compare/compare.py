"""Makes, judges and ranks every method, composition and baseline policy on one problem."""

from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from rematbench.advise.compare.bench import Bench, Task
from rematbench.advise.compare.candidates import (
    Candidate,
    CompareConfig,
    Made,
    asked_candidates,
    composed,
    compositions,
    first_candidates,
)
from rematbench.advise.compare.entry import Compared, Entry, Status, as_made, lost_reason
from rematbench.advise.compare.variants import best_variants
from rematbench.evaluate.lowered import same_plan
from rematbench.host.workers import NoAnswer, Pool
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from rematbench.problem import Problem


class Comparing:
    """One comparison of methods, compositions and policies on one problem, made step by step.

    `quick` makes every candidate without a planner, `late` the planners. Each candidate has
    `limit_s` CPU seconds of a worker process. `also` are further methods by name; with `only`, no
    candidate is made but the named ones.

    Within a step no result depends on which process answers first, so tables are the same on every
    machine (except for candidates given up after `limit_s` CPU seconds).
    """

    def __init__(
        self,
        problem: Problem,
        base: Plan,
        config: CompareConfig,
        *,
        methods: Sequence[Path] = (),
        also: Sequence[str] = (),
        only: Sequence[str] = (),
        processes: int = 2,
        limit_s: int = 4,
    ) -> None:
        self.registry = discover(methods)
        self.config, self.limit_s = config, limit_s
        self.problem, self.base = problem, base
        asked = asked_candidates(self.registry, config, problem, (*only, *also))
        self.pool: Pool[Task, Entry] = Pool(
            processes, Bench, (problem, base, tuple(methods)), limit_s
        )
        self.all, self.asked = not only, {candidate.name for candidate in asked}
        self.first = first_candidates(self.registry, config) if self.all else []
        known = {candidate.name for candidate in self.first}
        self.first += [candidate for candidate in asked if candidate.name not in known]
        self.tree = _Tree(base, config.most_methods)
        self.entries: dict[str, Entry] = {}

    def quick(self) -> Compared:
        """Make every candidate without a planner, and the best variants of the methods' grids."""
        list(self._grow([c for c in self.first if not self._planned(c)]))
        for entry in self._variants() if self.all else ():
            self.entries[entry.name] = entry
        list(self._grow(self._whole()))
        return self.comparison()

    def _variants(self) -> list[Entry]:
        made = (e for e in self.entries.values() if e.candidate.origin != "asked" and not e.clash)
        known = sorted(made, key=lambda e: e.name)
        most = self.config.most_methods
        return best_variants(self.problem, self.registry, self.base, most, known, self.ask)

    def late(self) -> Iterator[Entry]:
        """The entries of planners and of their compositions, each as soon as it is made."""
        for entry in self._grow([c for c in self.first if self._planned(c)]):
            if entry.name in {whole.name for whole in self._whole()}:
                self.pool.waiting.insert(0, entry)  # the entry comes again, with its step's parts
            else:
                yield entry
        self.pool.close()

    def everything(self) -> Compared:
        """All entries, quick and late, best first."""
        self.quick()
        list(self.late())
        return self.comparison()

    def comparison(self) -> Compared:
        """The entries so far, best first."""
        kept, repeated = _without_repeats(self.listed(), self.asked)
        return Compared(
            entries=tuple(sorted(kept, key=_rank)),
            repeated=repeated,
            unavailable=self.registry.broken,
        )

    def listed(self) -> list[Entry]:
        """Entries in the order of declaration, each composition after the methods that it is made
        of. Compositions that free no bytes beside their base are left out."""
        known = [self.entries[c.name] for c in self.first if c.name in self.entries]
        first = {candidate.name for candidate in self.first}
        grown = (e for e in self.entries.values() if e.candidate.name not in first)
        made = sorted(
            (e for e in grown if e.candidate.origin in ("composition", "variant")),
            key=lambda e: (len(e.candidate.methods), e.candidate.name),
        )
        return known + [entry for entry in made if self.tree.worth(entry)]

    def _whole(self) -> list[Entry]:
        """The entries that fit and whose step has not been broken into parts yet."""
        rows = self.comparison().entries
        fitting = (self.entries[row.candidate.name] for row in rows if row.status == "ok")
        return [entry for entry in fitting if not entry.parts_s]

    def ask(self, candidates: Sequence[Candidate]) -> list[Entry]:
        """The entries of the candidates, in the order of the candidates."""
        found: dict[str, Entry] = {}
        self.pool.add(candidates)
        for task, answer in self.pool.run():
            candidate = _candidate(task)
            found[candidate.name] = self._entry(candidate, answer)
        return [found[candidate.name] for candidate in candidates]

    def _grow(self, first: Sequence[Task]) -> Iterator[Entry]:
        self.pool.add(first)
        for task, answer in self.pool.run():
            candidate = _candidate(task)
            entry = self._entry(candidate, answer)
            self.entries[candidate.name] = entry
            if task is candidate:
                self.pool.add(self.tree.grown_by(entry))
            yield entry

    def _entry(self, candidate: Candidate, answer: Entry | NoAnswer) -> Entry:
        return answer if isinstance(answer, Entry) else _lost(candidate, answer, self.limit_s)

    def _planned(self, candidate: Candidate) -> bool:
        return self.registry.has_planner(candidate.methods)


class _Tree:
    """Compositions become candidates when the plan before their last method is known."""

    def __init__(self, base: Plan, most: int) -> None:
        self.base, self.most = base, most
        self.alone: list[Made] = []
        self.entries: dict[tuple[str, ...], Entry] = {}
        self.asked: set[str] = set()

    def grown_by(self, entry: Entry) -> list[Candidate]:
        """The compositions that become possible once this entry's plan is known."""
        if entry.plan is None or entry.candidate.origin in ("policy", "asked") or entry.clash:
            return []
        self.entries[entry.candidate.methods] = entry
        if entry.candidate.origin == "method":
            self.alone.append(as_made(self.base, entry))
        found = []
        for group in compositions(self.alone, self.most):
            names = tuple(made.candidate.method for made in group)
            before = self.entries.get(names[:-1])
            if before is not None and before.plan and "+".join(names) not in self.asked:
                self.asked.add("+".join(names))
                found.append(composed(group, before.plan))
        return found

    def worth(self, entry: Entry) -> bool:
        """Whether a composition frees bytes that its base does not, and overrules no decision."""
        before = self.entries.get(entry.candidate.methods[:-1])
        if entry.plan is None or before is None or entry.candidate.origin == "variant":
            return True
        return not entry.clash and entry.reserved_bytes < before.reserved_bytes


def _candidate(task: Task) -> Candidate:
    return task.candidate if isinstance(task, Entry) else task


def _lost(candidate: Candidate, why: NoAnswer, limit_s: int) -> Entry:
    status: Status = "failed" if why == "died" else "timed out"
    return Entry(candidate=candidate, status=status, reason=lost_reason(why, limit_s))


def _without_repeats(entries: Sequence[Entry], asked: Container[str]) -> tuple[list[Entry], int]:
    """The entries that a table shows, and how many others were left out as repetitions.

    Left out unless `asked`: compositions and policies whose plan equals an earlier plan, and
    policies whose tuning ends at the plan of their method. A method with a plan equal to an earlier
    one stays, with `same_as` filled in.
    """
    seen: dict[bytes, str] = {}
    kept: list[Entry] = []
    repeated = 0
    for entry in entries:
        if entry.plan is None:
            kept.append(entry)
            continue
        first = seen.setdefault(same_plan(entry.plan), entry.name)
        wanted = entry.candidate.name in asked
        if first == entry.name and (wanted or not _repeats(entry, kept)):
            kept.append(entry)
        elif wanted or entry.candidate.origin == "method":
            kept.append(replace(entry, same_as=first))
        else:
            repeated += 1
    return kept, repeated


def _repeats(entry: Entry, before: Sequence[Entry]) -> bool:
    """Whether a policy has the bytes and seconds of an earlier entry of its method."""
    if entry.candidate.origin != "policy":
        return False
    alike = [e.evaluation for e in before if e.candidate.family == entry.candidate.family]
    return entry.evaluation in alike


_ORDER: dict[str, int] = {"ok": 0, "oom": 1, "unsupported": 2, "timed out": 3, "failed": 4}


def _rank(entry: Entry) -> tuple[int, float, bool]:
    """Sorting key: fitting entries by tokens/s, others by missing bytes; equal plans last."""
    if entry.verdict is None or entry.evaluation is None:
        return _ORDER[entry.status], 0.0, False
    amount = entry.evaluation.tokens_per_s_per_gpu
    if entry.status == "oom":
        amount = min(entry.verdict.headroom_bytes, entry.verdict.host_headroom_bytes)
    return _ORDER[entry.status], -amount, bool(entry.same_as)
