"""One cell of the matrix: plans weighed and timed, with programs that its clusters share.

A program does not depend on the cluster, so the cells of one model and length share programs.  A
plan that does not fit is weighed (its bytes are counted) but not timed.
"""

from dataclasses import replace

import msgspec
from msgspec import Struct

from rematbench.choose.candidates import same_plan
from rematbench.choose.job import Job
from rematbench.choose.outcome import Status, reserved_bytes, unpressed
from rematbench.lowering.lower import lower
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import Composition, MethodError
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
    """An arm at a layout: the verdict by bytes, and the evaluation where the plan fits and is
    timed."""

    job: Job
    status: Status
    reason: str = ""
    plan: Plan | None = None
    weight: Weight | None = None
    evaluation: PlanEvaluation | None = None

    @property
    def speed(self) -> float:
        """Tokens/s/GPU; 0 where the plan is not timed."""
        return self.evaluation.tokens_per_s_per_gpu if self.evaluation else 0.0


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


def tried(job: Job, method: Composition, programs: Programs) -> Tried:
    """A method at a layout: its plan, weighed, and timed where the plan fits.  A method that fills
    the device leaves the reserve of the job's problem free."""
    problem = replace(job.problem, evaluator=programs.evaluate, weigher=programs.reserved)
    job = msgspec.structs.replace(job, problem=problem)
    try:
        plan = method.plan(problem, job.base)
        if isinstance(plan, Unsupported):
            return Tried(job=job, status="unsupported", reason=plan.reason)
        weight = programs.weight(problem, plan)
    except (PlanError, LayoutError, MethodError) as error:
        return Tried(job=job, status="failed", reason=f"{method.name}: {error}")
    if missing := weight.missing(problem):
        reason = "; ".join(f"{k}: {nbytes / GIB:.2f} GiB short" for k, nbytes in missing.items())
        return Tried(job=job, status="oom", reason=reason, plan=plan, weight=weight)
    found = programs.evaluate(problem, plan)
    if found.not_timed:
        return Tried(job=job, status="unsupported", reason=found.not_timed, plan=plan)
    return Tried(job=job, status="ok", plan=plan, weight=weight, evaluation=found)
