"""One cell of the matrix: plans weighed and timed, with programs that its clusters share.

A program does not depend on the cluster, so the cells of one model and length share programs.  A
plan that does not fit is weighed (its bytes are counted) but not timed.
"""

from dataclasses import replace

import msgspec
from msgspec import Struct

from rematbench.evaluate.breakdown import parts_of
from rematbench.evaluate.evaluation import PlanEvaluation, host_node_bytes
from rematbench.evaluate.evaluator import Evaluator, timed, without_cluster
from rematbench.evaluate.job import Job
from rematbench.evaluate.lowered import same_plan
from rematbench.evaluate.result import Status
from rematbench.host.table import GIB
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import Composition, MethodError
from rematbench.problem import Problem
from rematbench.spec.layout import LayoutError


class PlanBytes(Struct, frozen=True, kw_only=True):
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


class ArmTried(Struct, frozen=True, kw_only=True):
    """An arm at a layout: the verdict by bytes, and the evaluation where the plan fits and is
    timed."""

    job: Job
    status: Status
    reason: str = ""
    plan: Plan | None = None
    weight: PlanBytes | None = None
    evaluation: PlanEvaluation | None = None

    @property
    def speed(self) -> float:
        """Tokens/s/GPU; 0 where the plan is not timed."""
        return self.evaluation.tokens_per_s_per_gpu if self.evaluation else 0.0


class Numbers(Evaluator):
    """Lowered plans of one model and length, with their numbers on each cluster, each made once."""

    def __init__(self) -> None:
        super().__init__(without_cluster)
        self._evaluations: dict[tuple[str, str, bytes], PlanEvaluation] = {}
        self._parts: dict[tuple[str, str, bytes], dict[str, float]] = {}

    def weight(self, problem: Problem, plan: Plan) -> PlanBytes:
        """The bytes of a plan, which is not timed."""
        lowered = self.lowered(problem, plan)
        return PlanBytes(
            reserved_bytes=self.reserved(problem, plan).nbytes,
            peak_bytes=lowered.live_bytes,
            host_node_bytes=host_node_bytes(problem, lowered.ranks),
        )

    def evaluate(self, problem: Problem, plan: Plan) -> PlanEvaluation:
        """The evaluation of a plan as in evaluate/evaluator.py, with a shared program."""
        key = _key(problem, plan)
        if key not in self._evaluations:
            lowered, held = self.lowered(problem, plan), self.reserved(problem, plan)
            self._evaluations[key] = timed(problem, lowered, held)
        return self._evaluations[key]

    def parts(self, problem: Problem, plan: Plan) -> dict[str, float]:
        """Seconds of a plan's step by part, made once: the two tables often have the same fastest
        plan."""
        key = _key(problem, plan)
        if key not in self._parts:
            step_s = self.evaluate(problem, plan).step_s
            self._parts[key] = parts_of(problem, self.lowered(problem, plan).program, step_s)
        return self._parts[key]


def _key(problem: Problem, plan: Plan) -> tuple[str, str, bytes]:
    """The key of a plan's numbers: the cluster, the layout and the content of the plan."""
    return (problem.cluster.name, str(problem.layout), same_plan(plan))


def tried(job: Job, method: Composition, programs: Numbers) -> ArmTried:
    """A method at a layout: its plan, weighed, and timed where the plan fits.  A method that fills
    the device leaves the reserve of the job's problem free."""
    problem = replace(job.problem, evaluator=programs.evaluate, weigher=programs.weigh_within)
    job = msgspec.structs.replace(job, problem=problem)
    try:
        plan = method.plan(problem, job.base)
        if isinstance(plan, Unsupported):
            return ArmTried(job=job, status="unsupported", reason=plan.reason)
        weight = programs.weight(problem, plan)
    except (PlanError, LayoutError, MethodError) as error:
        return ArmTried(job=job, status="failed", reason=f"{method.name}: {error}")
    if missing := weight.missing(problem):
        reason = "; ".join(f"{k}: {nbytes / GIB:.2f} GiB short" for k, nbytes in missing.items())
        return ArmTried(job=job, status="oom", reason=reason, plan=plan, weight=weight)
    found = programs.evaluate(problem, plan)
    if found.not_timed:
        return ArmTried(job=job, status="unsupported", reason=found.not_timed, plan=plan)
    return ArmTried(job=job, status="ok", plan=plan, weight=weight, evaluation=found)
