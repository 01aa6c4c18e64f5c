"""Evaluates and ranks every method, composition and baseline policy on one job."""

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from rematbench.advise.candidates.candidate import CompareConfig
from rematbench.advise.compare.compositions import (
    Contender,
    Pair,
    composed,
    compositions,
    first_candidates,
    named_candidates,
)
from rematbench.advise.compare.grids import best_variants
from rematbench.advise.compare.tuning import Task, Tuning, blank
from rematbench.evaluate.breakdown import PARTS
from rematbench.evaluate.evaluator import same_plan
from rematbench.evaluate.result import PlannedJob, Result, Status
from rematbench.evidence.bands import ratio_band, with_host_rates, with_ties
from rematbench.host.workers import NoAnswer, Pool, lost_reason
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from rematbench.plugins.kinds import clash
from rematbench.worlds.packages.flags import Engines

COLUMNS = (
    *("name", "origin", "same_as", "status", "reason", "step_s", "tokens_per_s_per_gpu"),
    *("mfu_causal", "mfu_dense", "hfu", "gpu_hours_per_1e9_tokens", "peak_device_bytes"),
    *("recompute_flop", "offload_bytes", "reserved_bytes", "device_total_bytes"),
    *("host_node_bytes", "headroom_bytes", "host_headroom_bytes", "binds"),
    *("allocator_retries", "allocator_fails"),
    *(f"{part}_s" for part in PARTS),
    *("plan", "fits", "low_tokens_per_s_per_gpu", "high_tokens_per_s_per_gpu", "outside"),
    *("evidence", "tied_with_best", "host_bytes", "runs_on"),
)
"""The columns of a comparison in order; the facts of the job and `run_with` follow."""


STATUSES = ("ok", "fragmented", "dropping", "oom", "unsupported", "timed out", "failed")
"""All statuses, in the order in which a ranking lists them."""


class Comparison:
    """A comparison of methods, compositions and policies on one job, in two steps.

    `quick` evaluates all candidates except planners, `late` the planners.  Each candidate may take
    `limit_s` CPU seconds of a worker process.  `also`: names of further methods; `only`: the names
    of the only candidates to evaluate.

    Results do not depend on the order in which processes finish, so tables are the same on every
    machine (except for candidates that are given up after `limit_s` CPU seconds).
    """

    def __init__(
        self,
        job: PlannedJob,
        config: CompareConfig,
        *,
        methods: Sequence[Path] = (),
        also: Sequence[str] = (),
        only: Sequence[str] = (),
        processes: int = 2,
        limit_s: int = 4,
    ) -> None:
        self.job, self.config, self.limit_s = job, config, limit_s
        self.registry, self.engines = discover(methods), Engines(job.problem)
        named = named_candidates(self.registry, config, job.problem, (*only, *also))
        self.pool: Pool[Task, Result] = Pool(processes, Tuning, (job, tuple(methods)), limit_s)
        self.all, self.named = not only, {candidate.name for candidate in named}
        first = first_candidates(self.registry, config, job.problem) if self.all else []
        self.first = sorted(first, key=self._has_planner)  # so of equal plans a planner's is last
        names = {candidate.name for candidate in self.first}
        self.first += [candidate for candidate in named if candidate.name not in names]
        self.pairs: dict[str, Pair] = {}
        self.alone: list[tuple[Contender, Plan]] = []
        self.composed: set[str] = set()

    def quick(self) -> None:
        """Evaluate all candidates except planners, and the best variants of methods' grids."""
        list(self._grow([c for c in self.first if not self._has_planner(c)]))
        if self.all:
            pairs = [pair for pair in self.pairs.values() if pair[0].origin != "asked"]
            pairs.sort(key=lambda pair: pair[1].method)
            most, run = self.config.most_methods, self._evaluate
            for candidate, result in best_variants(self.job, self.registry, most, pairs, run):
                self.pairs[candidate.name] = candidate, result
        list(self._grow(self._without_parts()))

    def late(self) -> Iterator[Result]:
        """Yield the results of planners and of their compositions, each as soon as it is ready."""
        for candidate, result in self._grow([c for c in self.first if self._has_planner(c)]):
            if candidate.name in {item.name for item, _ in self._without_parts()}:
                self.pool.waiting.insert(0, (candidate, result))  # to break the step into parts
            else:
                yield result
        self.pool.close()

    def everything(self) -> list[Result]:
        """All results, quick and late, best first."""
        self.quick()
        list(self.late())
        return self.results()

    def results(self) -> list[Result]:
        """The results so far, best first, with bands, ties, and the engines that can run each plan.
        `same_as` names an earlier result with an equal plan."""
        rows, _ = self._rows()
        return ranked(
            [
                replace(result, runs_on=self.engines.of(result.plan)) if result.plan else result
                for _, result in rows
            ]
        )

    @property
    def left_out(self) -> int:
        """The number of compositions and policies without a row, because their plan equals that of
        a row."""
        return self._rows()[1]

    def _rows(self) -> tuple[list[Pair], int]:
        # Candidates with results: in the order of declaration, planners last, compositions after
        # their methods. Compositions that free no bytes compared with their base are left out.
        first = {candidate.name: self.pairs.get(candidate.name) for candidate in self.first}
        more = [
            pair for name, pair in self.pairs.items() if name not in first and self._has_row(*pair)
        ]
        more.sort(key=lambda pair: (len(pair[0].methods), pair[0].name))
        return without_repeats([pair for pair in (*first.values(), *more) if pair], self.named)

    def _has_row(self, candidate: Contender, result: Result) -> bool:
        """Whether a candidate is a variant, or a composition that frees bytes compared with its
        base."""
        if candidate.origin != "composition":
            return candidate.origin == "variant"
        before, evaluation = self._before(candidate.methods), result.evaluation
        if before is None or before.evaluation is None or evaluation is None:
            return True
        return evaluation.reserved_bytes < before.evaluation.reserved_bytes

    def _before(self, names: Sequence[str]) -> Result | None:
        """The result of the composition of all named methods but the last."""
        pair = self.pairs.get("+".join(names[:-1]))
        return pair[1] if pair else None

    def _without_parts(self) -> list[Pair]:
        """The rows that fit and whose step is not yet broken into parts."""
        names = [candidate.name for candidate, result in self._rows()[0] if result.fits]
        pairs = [self.pairs[name] for name in names]
        return [pair for pair in pairs if not (pair[1].parts_s or pair[1].retries)]

    def _evaluate(self, candidates: Sequence[Contender]) -> list[Pair]:
        """Candidates with results, in order, without those that overrule their base."""
        pairs: dict[str, Pair] = {}
        self.pool.add(candidates)
        for task, answer in self.pool.run():
            candidate = task[0] if isinstance(task, tuple) else task
            pairs[candidate.name] = candidate, self._result(candidate, answer)
        every = [pairs[candidate.name] for candidate in candidates]
        return [pair for pair in every if not self._clashes(*pair)]

    def _grow(self, first: Sequence[Task]) -> Iterator[Pair]:
        """Evaluate tasks and the compositions that their plans make possible."""
        self.pool.add(first)
        for task, answer in self.pool.run():
            candidate = task[0] if isinstance(task, tuple) else task
            result = self._result(candidate, answer)
            if self._clashes(candidate, result):
                continue
            self.pairs[candidate.name] = candidate, result
            if task is candidate:
                self.pool.add(self._compositions_on(candidate, result))
            yield candidate, result

    def _compositions_on(self, candidate: Contender, result: Result) -> list[Contender]:
        if result.plan is None or candidate.origin not in ("method", "composition"):
            return []
        if candidate.origin == "method":
            self.alone.append((candidate, result.plan))
        candidates = []
        for group in compositions(self.job.base, self.alone, self.config.most_methods):
            names = [item.name for item in group]
            before = self._before(names)
            if before is not None and before.plan and "+".join(names) not in self.composed:
                self.composed.add("+".join(names))
                candidates.append(composed(group, before.plan))
        return candidates

    def _result(self, candidate: Contender, answer: Result | NoAnswer) -> Result:
        """A worker's result with this process's job, or a result that says why there is none."""
        if isinstance(answer, Result):
            return replace(answer, job=self.job)
        status: Status = "failed" if answer == "died" else "timed out"
        reason = lost_reason(answer, self.limit_s)
        return replace(blank(self.job, candidate), status=status, reason=reason)

    def _clashes(self, candidate: Contender, result: Result) -> bool:
        """Whether a composed plan overrules a decision of its base: it is then no composition."""
        base, plan = candidate.base, result.plan
        return base is not None and plan is not None and bool(clash(self.job.problem, base, plan))

    def _has_planner(self, candidate: Contender) -> bool:
        return self.registry.has_planner(candidate.methods)


def without_repeats(pairs: Sequence[Pair], named: Container[str]) -> tuple[list[Pair], int]:
    """The pairs that a table shows, and the number of pairs dropped as repetitions.

    Compositions and policies whose plan equals an earlier one are dropped unless they are `named`,
    and so are policies whose tuning ends at their method's plan.  A method whose plan equals an
    earlier one stays, with `same_as` set.
    """
    seen: dict[bytes, str] = {}
    rows: list[Pair] = []
    for candidate, result in pairs:
        if result.plan is None:
            rows.append((candidate, result))
            continue
        first = seen.setdefault(same_plan(result.plan), result.method)
        wanted = candidate.name in named
        if first == result.method and (wanted or not _repeats(result, rows)):
            rows.append((candidate, result))
        elif wanted or candidate.origin == "method":
            rows.append((candidate, replace(result, same_as=first)))
    return rows, len(pairs) - len(rows)


def _repeats(result: Result, before: Sequence[Pair]) -> bool:
    """Whether a policy has the bytes and seconds of an earlier result of its method."""
    alike = (item for _, item in before if item.family == result.family)
    return result.origin == "policy" and any(item.evaluation == result.evaluation for item in alike)


def ranked(results: Sequence[Result]) -> list[Result]:
    """Rank the results: plans that fit by tokens/s (by free bytes if time is not modelled), then
    the others by missing bytes.  Each result gets the band of its speed (that of the earlier result
    if plans are equal), a word for its headroom, and a mark if it ties with the fastest."""
    families = {result.method: result.family for result in results}
    banded = [
        with_host_rates(result, families.get(result.same_as, result.family))
        for result in sorted(results, key=_rank)
    ]
    return with_ties(banded, ratio_band())


def _rank(result: Result) -> tuple[int, bool, float, bool]:
    place, verdict = STATUSES.index(result.status), result.verdict
    if verdict is None:
        return place, True, 0.0, False
    amount = result.tokens_per_s_per_gpu
    if amount is None or not result.fits:
        amount = min(verdict.headroom_bytes, verdict.host_headroom_bytes)
    return place, result.step_s is None, -amount, bool(result.same_as)


def table(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The rows of a comparison, with COLUMNS and the facts of the job."""
    return [
        result.line(
            COLUMNS,
            origin=result.origin,
            host_bytes=result.problem.cluster.host_bytes,
        )
        for result in results
    ]
