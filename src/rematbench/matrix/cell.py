"""One cell of the matrix: the candidate layouts at which an arm is tried, and the arm's verdicts.

A program does not depend on the cluster, so the cells of one model and length share programs.  A
plan that does not fit is weighed (its bytes are counted) but not timed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
from msgspec import Struct

from rematbench.choose.candidates import same_plan
from rematbench.choose.outcome import Status, reserved_bytes, unpressed
from rematbench.lowering.lower import lower
from rematbench.matrix.layouts import KEPT, Candidate, state_bytes
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import IDENTITY, Composition, Registry
from rematbench.problem import Problem
from rematbench.program.allocator import AllocatorPeaks
from rematbench.program.program import Program
from rematbench.simulate.breakdown import parts_of
from rematbench.simulate.evaluate import (
    PlanEvaluation,
    RankBytes,
    evaluate_program,
    host_node_bytes,
    program_bytes,
)
from rematbench.spec.layout import LayoutError
from rematbench.tables.table import GIB

SLACK = 1.1
"""Largest estimated bytes of a candidate that is tried, over the device's usable bytes."""

MARGIN = 1.1
"""Factor by which a method may exceed the largest share of the limit that the method reached at
the candidates tried before."""


class Weight(Struct, frozen=True, kw_only=True):
    """The bytes of a lowered plan: bytes reserved on the fullest device, the largest ledger peak,
    and pinned host bytes on the fullest node.

    Where the ledger peak exceeds the usable bytes, the peak is also given as the reserved bytes: no
    allocator needs less, and a plan that cannot run is not replayed.
    """

    reserved_bytes: int
    peak_bytes: int
    host_node_bytes: int

    def missing(self, problem: Problem) -> dict[str, int]:
        """Missing bytes by place (device, host); empty where the plan fits."""
        short = {
            "device": self.reserved_bytes - problem.usable_bytes,
            "host": self.host_node_bytes - problem.cost.host_room_bytes,
        }
        return {where: nbytes for where, nbytes in short.items() if nbytes > 0}


class Tried(Struct, frozen=True, kw_only=True):
    """An arm at a candidate: the verdict by bytes, and the evaluation where the plan fits and is
    timed."""

    candidate: Candidate
    status: Status
    reason: str = ""
    plan: Plan | None = None
    weight: Weight | None = None
    evaluation: PlanEvaluation | None = None

    @property
    def speed(self) -> float:
        """Tokens/s/GPU; 0 where the plan is not timed."""
        return self.evaluation.tokens_per_s_per_gpu if self.evaluation else 0.0

    @property
    def tuned(self) -> bool:
        """Whether the method tunes the plan to fill the device; the bytes of such a plan do not
        predict those at another candidate."""
        return self.plan is not None and bool({"alpha", "bound"} & self.plan.fit.keys())


class Programs:
    """Lowered plans of one model and length, with their bytes and evaluations, each made once."""

    def __init__(self) -> None:
        self._programs: dict[tuple[str, bytes], Program] = {}
        self._ranks: dict[tuple[str, bytes], tuple[RankBytes, ...]] = {}
        self._unpressed: dict[tuple[str, bytes], AllocatorPeaks] = {}
        self._reserved: dict[tuple[int, str, bytes], int] = {}
        self._weights: dict[tuple[str, str, bytes], Weight] = {}
        self._evaluations: dict[tuple[str, str, bytes], PlanEvaluation] = {}
        self._parts: dict[tuple[str, str, bytes], dict[str, float]] = {}

    def lowered(self, problem: Problem, plan: Plan) -> Program:
        """The program of a plan; all clusters share one object."""
        key = (str(problem.layout), same_plan(plan))
        if key not in self._programs:
            self._programs[key] = lower(plan, problem)
        return self._programs[key]

    def weight(self, problem: Problem, plan: Plan) -> Weight:
        """The bytes of a plan, which is not timed."""
        key = _key(problem, plan)
        _, lay, content = key
        if key not in self._weights:
            program = self.lowered(problem, plan)
            if (lay, content) not in self._ranks:
                self._ranks[lay, content] = program_bytes(problem, plan, program)
            ranks = self._ranks[lay, content]
            at = (problem.usable_bytes, lay, content)
            peak = max(rank.device_peak for rank in ranks)
            if at not in self._reserved:
                over = peak > problem.usable_bytes
                self._reserved[at] = peak if over else self._replay(problem, program, key[1:])
            self._weights[key] = Weight(
                reserved_bytes=self._reserved[at],
                peak_bytes=peak,
                host_node_bytes=host_node_bytes(problem, ranks),
            )
        return self._weights[key]

    def _replay(self, problem: Problem, program: Program, key: tuple[str, bytes]) -> int:
        ranks = self._ranks[key]
        if key not in self._unpressed:
            self._unpressed[key] = unpressed(program, ranks)
        return reserved_bytes(problem, program, ranks, self._unpressed[key])

    def evaluate(self, problem: Problem, plan: Plan) -> PlanEvaluation:
        """The evaluation of a plan as in choose/outcome.py, with a shared program."""
        key = _key(problem, plan)
        if key not in self._evaluations:
            reserved = self.reserved(problem, plan)
            program, ranks = self.lowered(problem, plan), self._ranks[key[1:]]
            found = evaluate_program(problem, plan, program, ranks=ranks)
            self._evaluations[key] = msgspec.structs.replace(found, reserved_bytes=reserved)
        return self._evaluations[key]

    def parts(self, problem: Problem, plan: Plan) -> dict[str, float]:
        """Seconds of a plan's step by part, made once: the two tables often have the same fastest
        plan."""
        key = _key(problem, plan)
        if key not in self._parts:
            step_s = self.evaluate(problem, plan).step_s
            self._parts[key] = parts_of(problem, self.lowered(problem, plan), step_s)
        return self._parts[key]

    def reserved(self, problem: Problem, plan: Plan) -> int:
        """The reserved bytes of a plan; this method is the `weigher` of the cell's problems."""
        return self.weight(problem, plan).reserved_bytes


def _key(problem: Problem, plan: Plan) -> tuple[str, str, bytes]:
    """The key of a plan's numbers: the cluster, the layout and the content of the plan."""
    return (problem.cluster.name, str(problem.layout), same_plan(plan))


class Limit(NamedTuple):
    """Speed and bytes at a candidate if all activations are kept, whether or not they fit."""

    speed: float
    peak_bytes: int
    candidate: Candidate


class Cell:
    """One (model, cluster, length): its candidates, and the arms tried at the candidates."""

    def __init__(self, found: Sequence[Candidate], programs: Programs, registry: Registry) -> None:
        self.programs = programs
        self._tried: dict[tuple[str, str], Tried] = {}
        keep = registry.resolve(IDENTITY)  # without a memory limit no method is faster
        limits = [self._limit(c, keep) for c in found if c.fate == KEPT]
        self.limits = sorted(limits, key=lambda limit: -limit.speed)
        self._speeds = {str(limit.candidate.layout): limit.speed for limit in limits}

    def _limit(self, candidate: Candidate, keep: Composition) -> Limit:
        assert candidate.problem is not None
        programs = self.programs
        problem = replace(candidate.problem, evaluator=programs.evaluate, weigher=programs.reserved)
        plan = keep.plan(problem)
        assert not isinstance(plan, Unsupported)
        return Limit(
            programs.evaluate(problem, plan).tokens_per_s_per_gpu,
            programs.weight(problem, plan).peak_bytes,
            msgspec.structs.replace(candidate, problem=problem),
        )

    def weighed(self, candidate: Candidate, name: str, method: Composition) -> Tried:
        """The plan and verdict of an arm at a candidate, made once."""
        key = (name, str(candidate.layout))
        if key not in self._tried:
            self._tried[key] = self._weigh(candidate, method)
        return self._tried[key]

    def _weigh(self, candidate: Candidate, method: Composition) -> Tried:
        problem = candidate.problem
        assert problem is not None
        try:
            plan = method.plan(problem)
            if isinstance(plan, Unsupported):
                return Tried(candidate=candidate, status="unsupported", reason=plan.reason)
            weight = self.programs.weight(problem, plan)
        except (PlanError, LayoutError) as error:
            reason = f"{method.name}: {error}"
            return Tried(candidate=candidate, status="failed", reason=reason)
        missing = weight.missing(problem)
        reason = "; ".join(f"{k}: {nbytes / GIB:.2f} GiB short" for k, nbytes in missing.items())
        status: Status = "oom" if missing else "ok"
        return Tried(candidate=candidate, status=status, reason=reason, plan=plan, weight=weight)

    def timed(self, tried: Tried) -> Tried:
        """A weighed arm with its evaluation where the plan fits; `unsupported` where a plan that
        fits cannot be timed."""
        if tried.status != "ok" or tried.evaluation is not None:
            return tried
        assert tried.candidate.problem is not None
        assert tried.plan is not None
        found = self.programs.evaluate(tried.candidate.problem, tried.plan)
        if found.not_timed:
            return msgspec.structs.replace(tried, status="unsupported", reason=found.not_timed)
        return msgspec.structs.replace(tried, evaluation=found)

    def best(
        self, name: str, method: Composition, *, least_pp: int = 1
    ) -> tuple[Tried | None, int]:
        """The arm at its fastest fitting candidate, and the number of candidates tried.  Where no
        candidate fits: the arm at the candidate that misses the fewest bytes, or a refusal.  None
        where the cell has no candidate with `least_pp` pipeline ranks.

        Candidates are tried in order of their limits, the highest speed first.  The candidate with
        the smallest limit in bytes is weighed before all others: a method that does not fill the
        device and does not fit at this candidate is given up.
        """
        limits = [limit for limit in self.limits if limit.candidate.layout.pp >= least_pp]
        lean = sorted(limits, key=lambda limit: limit.peak_bytes)
        answers = ((limit, self.weighed(limit.candidate, name, method)) for limit in lean)
        found = next(((at, was) for at, was in answers if was.status != "unsupported"), None)
        if found is None:
            return (self.weighed(lean[0].candidate, name, method), 0) if lean else (None, 0)
        leanest, first = found
        if first.status != "ok" and not first.tuned:
            return first, 1
        share = _share(first, leanest)
        tried = [first]
        for limit in limits:
            wins = _may_win(limit, tried, self._speeds)
            if wins and (limit is leanest or _may_fit(limit, share)):
                tried.append(self.timed(self.weighed(limit.candidate, name, method)))
        count = len({str(one.candidate.layout) for one in tried if one.status != "unsupported"})
        return min(tried, key=_preference), count


def _preference(tried: Tried) -> tuple[int, float]:
    """Sort key: fitting verdicts by speed, then plans that do not fit by missing bytes (of the
    ledger peak or of the host), then failures and refusals."""
    order = {"ok": 0, "oom": 1, "failed": 2, "unsupported": 3}
    problem, amount = tried.candidate.problem, -tried.speed
    if tried.status == "oom" and tried.weight is not None and problem is not None:
        weight = tried.weight
        device = weight.peak_bytes - problem.usable_bytes
        amount = max(device, weight.host_node_bytes - problem.cost.host_room_bytes)
    return order[tried.status], amount


def _may_win(limit: Limit, tried: Sequence[Tried], speeds: dict[str, float]) -> bool:
    """Whether a candidate may be faster than the best one tried: whether MARGIN times the largest
    share of a limit that the method has reached, applied to this limit, exceeds the best speed."""
    timed = [one for one in tried if one.evaluation is not None]
    if not timed:
        return True
    reached = max(one.speed / speeds[str(one.candidate.layout)] for one in timed)
    return min(1.0, MARGIN * reached) * limit.speed > max(one.speed for one in timed)


def _share(first: Tried, limit: Limit) -> float:
    """Bytes beyond states that a method needs at a candidate, as a share of those that keeping all
    activations needs; 0 where the bytes say nothing about other candidates."""
    if first.tuned or first.weight is None or first.candidate.problem is None:
        return 0.0
    states = state_bytes(first.candidate.problem)
    return (first.weight.peak_bytes - states) / max(1, limit.peak_bytes - states)


def _may_fit(limit: Limit, share: float) -> bool:
    assert limit.candidate.problem is not None
    states = state_bytes(limit.candidate.problem)
    need = states + share * (limit.peak_bytes - states)
    return need <= SLACK * limit.candidate.problem.usable_bytes
