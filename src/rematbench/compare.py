"""Every method, composition and baseline policy on one problem: made, judged, ranked."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from rematbench.binding import parts_of
from rematbench.candidates import (
    TUNED,
    Candidate,
    CompareConfig,
    Made,
    changed_kinds,
    composed,
    compositions,
    first_candidates,
    present,
    same_plan,
)
from rematbench.collector import collect_rarely
from rematbench.discover import MethodError, discover
from rematbench.evaluate import PlanEvaluation
from rematbench.layout import LayoutError
from rematbench.lower import lower
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.problem import Problem
from rematbench.solve.search import smallest_feasible
from rematbench.suite import Verdict, run_plan
from rematbench.workers import Lost, Pool

Status = Literal["ok", "oom", "unsupported", "failed", "timed out"]

UNPLANNED = 2**62
"""Bytes short of a plan that there is not: less than any other."""


class Entry(Struct, frozen=True, kw_only=True):
    """One candidate's outcome.  `parts_s` are the step's seconds by binding.PARTS, where it fits;
    `same_as` names the entry before it with an equal plan."""

    candidate: Candidate
    status: Status
    reason: str = ""
    settings: dict[str, Any] = {}
    plan: Plan | None = None
    evaluation: PlanEvaluation | None = None
    verdict: Verdict | None = None
    parts_s: dict[str, float] = {}
    same_as: str = ""

    @property
    def name(self) -> str:
        """The candidate's name with what was tuned."""
        key = self.candidate.smallest
        tuned = f" {self.settings[key]}" if key in self.settings else ""
        return f"{self.candidate.name}{tuned}"

    @property
    def gpu_hours_per_1e9_tokens(self) -> float | None:
        """GPU-hours to train on 1e9 tokens."""
        rate = self.evaluation.tokens_per_s_per_gpu if self.evaluation else None
        return 1e9 / rate / 3600 if rate else None


class Comparison(Struct, frozen=True, kw_only=True):
    """All entries, best first, and how many compositions were left out as equal to another plan."""

    entries: tuple[Entry, ...]
    repeated: int
    unavailable: dict[str, str]


class Bench:
    """Makes candidates of one problem; a worker process holds one."""

    def __init__(self, problem: Problem, base: Plan, methods: tuple[Path, ...]) -> None:
        collect_rarely()
        self.problem, self.base, self.registry = problem, base, discover(methods)

    def __call__(self, candidate: Candidate) -> Entry:
        """The candidate's entry, whatever happens."""
        try:
            return self._entry(candidate)
        except (PlanError, LayoutError, MethodError) as error:
            return Entry(candidate=candidate, status="failed", reason=str(error))
        except Exception as error:  # one method never takes the others down
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return Entry(candidate=candidate, status="failed", reason=reason)

    def _entry(self, candidate: Candidate) -> Entry:
        settings = present(candidate.settings, self.problem)
        if candidate.smallest:
            settings = {**settings, candidate.smallest: self._smallest(candidate, settings)}
        plan = self._plan(candidate, settings)
        if isinstance(plan, Unsupported):
            return Entry(
                candidate=candidate, status="unsupported", reason=plan.reason, settings=settings
            )
        outcome = run_plan(self.problem, plan)
        assert outcome.evaluation is not None
        parts_s: dict[str, float] = {}
        if outcome.status == "ok":
            program = lower(plan, self.problem)
            parts_s = parts_of(self.problem, program, outcome.evaluation.step_s)
        return Entry(
            candidate=candidate,
            status="ok" if outcome.status == "ok" else "oom",
            reason=outcome.reason,
            settings=settings,
            plan=plan,
            evaluation=outcome.evaluation,
            verdict=outcome.verdict,
            parts_s=parts_s,
        )

    def _plan(self, candidate: Candidate, settings: Mapping[str, Any]) -> Plan | Unsupported:
        method = self.registry.resolve(candidate.method, settings).methods[0]
        return method.plan(self.problem, candidate.base or self.base)

    def _smallest(self, candidate: Candidate, settings: Mapping[str, Any]) -> int:
        """The least value from 1 that fits, a chunk's layers at most; where not even that fits,
        the best of powers of two (groups of layers are worst at both ends)."""
        top = max(len(chunk) for rank in self.base.partition for chunk in rank)

        def margin(value: int) -> int:
            plan = self._plan(candidate, {**settings, candidate.smallest: value})
            return (
                -UNPLANNED
                if isinstance(plan, Unsupported)
                else self.problem.cost.headroom_bytes(plan)
            )

        found = smallest_feasible(lambda steps: margin(steps + 1), top - 1) if top > 1 else 0
        if found is not None:
            return found + 1
        values = [1 << power for power in range(top.bit_length())]
        margins = {value: margin(value) for value in values}
        return next((v for v in values if margins[v] >= 0), max(values, key=margins.__getitem__))


def compare(
    problem: Problem,
    base: Plan,
    config: CompareConfig,
    *,
    methods: Sequence[Path] = (),
    processes: int = 2,
    limit_s: int = 4,
) -> Comparison:
    """Make every candidate, each within `limit_s` CPU seconds of a worker process; rank them."""
    registry = discover(methods)
    pool: Pool[Candidate, Entry] = Pool(processes, Bench, (problem, base, tuple(methods)), limit_s)
    first = first_candidates(registry, config)
    tree = _Tree(base, config.most_methods)
    entries: dict[str, Entry] = {}
    pool.add(first)
    for candidate, answer in pool.run():
        entry = answer if isinstance(answer, Entry) else _lost(candidate, answer, limit_s)
        entries[candidate.name] = entry
        pool.add(tree.grown_by(entry))
    ordered = [entries[c.name] for c in first]
    ordered += sorted(
        (e for e in entries.values() if e.candidate.origin == "composition"),
        key=lambda e: (len(e.candidate.methods), e.candidate.name),
    )
    kept, repeated = _without_repeats(ordered)
    return Comparison(
        entries=tuple(sorted(kept, key=_rank)), repeated=repeated, unavailable=registry.broken
    )


class _Tree:
    """Compositions become candidates when the plan before their last method is known."""

    def __init__(self, base: Plan, most: int) -> None:
        self.base, self.most = base, most
        self.alone: list[Made] = []
        self.plans: dict[tuple[str, ...], Plan] = {}
        self.asked: set[str] = set()

    def grown_by(self, entry: Entry) -> list[Candidate]:
        """The candidates that an entry makes possible."""
        if entry.plan is None or entry.candidate.origin == "policy":
            return []
        self.plans[entry.candidate.methods] = entry.plan
        if entry.candidate.origin == "method":
            self.alone.append(
                Made(
                    candidate=entry.candidate,
                    plan=entry.plan,
                    kinds=changed_kinds(self.base, entry.plan),
                    tuned=entry.plan.fit.get("bound") == TUNED,
                )
            )
        found = []
        for group in compositions(self.alone, self.most):
            names = tuple(made.candidate.method for made in group)
            before = self.plans.get(names[:-1])
            if before is not None and "+".join(names) not in self.asked:
                self.asked.add("+".join(names))
                found.append(composed(group, before))
        return found


def _lost(candidate: Candidate, why: Lost, limit_s: int) -> Entry:
    if why == "died":
        return Entry(candidate=candidate, status="failed", reason="its process died")
    reason = f"not planned within {limit_s} CPU seconds (--limit SECONDS allows more)"
    return Entry(candidate=candidate, status="timed out", reason=reason)


def _without_repeats(entries: Sequence[Entry]) -> tuple[list[Entry], int]:
    """Entries with `same_as` filled in; left out are compositions and policies that repeat a plan,
    and a policy tuned until it does what its method does anyway."""
    seen: dict[bytes, str] = {}
    kept: list[Entry] = []
    repeated = 0
    for entry in entries:
        if entry.plan is None:
            kept.append(entry)
            continue
        first = seen.setdefault(same_plan(entry.plan), entry.name)
        if first == entry.name and not _repeats(entry, kept):
            kept.append(entry)
        elif entry.candidate.origin == "method":
            kept.append(replace(entry, same_as=first))
        else:
            repeated += 1
    return kept, repeated


def _repeats(entry: Entry, before: Sequence[Entry]) -> bool:
    """Whether a policy's bytes and seconds are those of its method."""
    if entry.candidate.origin != "policy":
        return False
    alike = [e.evaluation for e in before if e.candidate.family == entry.candidate.family]
    return entry.evaluation in alike


_ORDER: dict[str, int] = {"ok": 0, "oom": 1, "unsupported": 2, "timed out": 3, "failed": 4}


def _rank(entry: Entry) -> tuple[int, float, bool]:
    """Fitting first, by tokens/s; then by what is missing; equal plans after the one they equal."""
    if entry.verdict is None or entry.evaluation is None:
        return _ORDER[entry.status], 0.0, False
    amount = entry.evaluation.tokens_per_s_per_gpu
    if entry.status == "oom":
        amount = min(entry.verdict.headroom_bytes, entry.verdict.host_headroom_bytes)
    return _ORDER[entry.status], -amount, bool(entry.same_as)
