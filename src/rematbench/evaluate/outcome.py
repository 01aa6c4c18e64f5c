"""Problems from plain inputs, the outcome of one method on a problem, the verdict on memory."""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import (
    PlanEvaluation,
    RankBytes,
    evaluate_program,
    fullest_rank,
)
from rematbench.evaluate.proof import Proof, check
from rematbench.evaluate.reserved import Lowered, Reserved, lately, replayed, weighed
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import Composition, MethodError
from rematbench.problem import Problem, Weight
from rematbench.spec.cluster import Cluster
from rematbench.spec.constants import Calibration
from rematbench.spec.layout import LayoutError
from rematbench.spec.load import calibration, load_cluster, load_model, load_system
from rematbench.spec.problemspec import ProblemSpec
from rematbench.spec.system import Home, System
from rematbench.workload import Model, Workload

Status = Literal["ok", "oom", "unsupported", "failed"]
Variant = Literal["compile", "async_tp"]


class Verdict(Struct, frozen=True, kw_only=True):
    """Whether a plan fits. `headroom_bytes` is usable less needed device bytes on the rank with the
    least headroom (negative: out of memory); `binds` names the memory that is short, else
    "nothing"."""

    fits: bool
    headroom_bytes: int
    host_headroom_bytes: int
    binds: str


class Outcome(Struct, frozen=True, kw_only=True):
    """The outcome of one method on one problem: a row of a table in every case. For an unsupported
    plan, `evaluation` has bytes that hold and seconds that do not (its `not_timed` is the
    reason)."""

    status: Status
    reason: str = ""
    plan: Plan | None = None
    evaluation: PlanEvaluation | None = None
    verdict: Verdict | None = None
    proof: Proof | None = None


def system_variant(system: System, variants: tuple[Variant, ...]) -> System | Unsupported:
    """A stack with one of its options switched on; Unsupported names an option that the stack
    lacks. compile: torch.compile fuses SiLU with the product. async_tp: sequence-parallel
    collectives run beside the GEMMs that they feed."""
    for variant in variants:
        if variant not in system.features:
            return Unsupported(f"system {system.name} has no {variant}")
    if "compile" in variants:
        system = replace(system, compiled=True, fused_swiglu=True)
    if "async_tp" in variants:
        system = replace(system, tp_overlap="gemm")
    return system


def make_problem(spec: ProblemSpec, constants: Calibration | None = None) -> Problem:
    """A problem with the chunk-level evaluator bound; names and files are loaded. `attention` is
    flash (the stack's kernel), unfused, or a kernel by name. Raises, each with one clear line:
    ConfigError for names, LayoutError for layouts, RateError for a kernel that the GPUs cannot
    run."""
    layout = spec.layout
    model = spec.model if isinstance(spec.model, Model) else load_model(spec.model)
    cluster = spec.cluster if isinstance(spec.cluster, Cluster) else load_cluster(spec.cluster)
    if spec.hbm_bytes is not None:
        cluster = replace(cluster, hbm_bytes=spec.hbm_bytes)
    return Problem(
        workload=Workload(model=model, seq_len=spec.seq_len, precision=spec.precision),
        cluster=cluster,
        system=hosting(spec.system, spec.optimizer),
        layout=layout,
        calibration=constants or calibration(),
        attention="unfused" if spec.attention == "unfused" else "flash",
        backend="" if spec.attention == "flash" else spec.attention,
        evaluator=evaluate,
        weigher=weigh,
    )


def hosting(named: str | System, optimizer: Home | None) -> System:
    """The stack, with optimizer states on the device or on the host where `optimizer` says so."""
    system = named if isinstance(named, System) else load_system(named)
    return replace(system, optimizer_on_host=optimizer == "host") if optimizer else system


def run_method(
    problem: Problem, method: Composition, base: Plan | None = None, *, checked: bool = False
) -> Outcome:
    """The outcome of a method on a problem; `checked` also proves the lowered program safe."""
    try:
        plan = method.plan(problem, base)
        if isinstance(plan, Unsupported):
            return Outcome(status="unsupported", reason=plan.reason)
        return run_plan(problem, plan, checked=checked)
    except (PlanError, LayoutError) as error:
        return Outcome(status="failed", reason=f"{method.name}: {error}")
    except MethodError as error:
        return Outcome(status="failed", reason=str(error))


def run_plan(problem: Problem, plan: Plan, *, checked: bool = False) -> Outcome:
    """The outcome of a plan that is given. Raises PlanError if the plan cannot be lowered."""
    proof = None
    if checked:
        lowered = lately(problem, plan)
        proof = check(lowered.program)
        evaluation = timed(problem, lowered, weighed(problem, lowered))
    else:
        found = problem.cost.evaluate(plan)
        assert isinstance(found, PlanEvaluation)
        evaluation = found
    verdict = judge(problem, evaluation)
    untimed = evaluation.not_timed if verdict.fits else ""
    status: Status = "ok" if verdict.fits else "oom"
    return Outcome(
        status="unsupported" if untimed else status,
        reason=untimed if verdict.fits else verdict.binds,
        plan=plan,
        evaluation=evaluation,
        verdict=verdict,
        proof=proof,
    )


def evaluate(problem: Problem, plan: Plan) -> PlanEvaluation:
    """Chunk-level evaluation with the allocator's bytes: the evaluator of a suite's problems."""
    lowered = lately(problem, plan)
    return timed(problem, lowered, weighed(problem, lowered))


def weigh(problem: Problem, plan: Plan) -> Weight:
    """The bytes of `evaluate`: the weigher of a suite's problems."""
    lowered = lately(problem, plan)
    return Weight(lowered.peak_device_bytes, weighed(problem, lowered).nbytes)


def timed(problem: Problem, lowered: Lowered, held: Reserved) -> PlanEvaluation:
    """The evaluation of a plan that `weighed` has weighed."""
    found = evaluate_program(problem, lowered.plan, lowered.program, ranks=lowered.ranks)
    return replace(found, reserved_bytes=held.nbytes, pressed=held.pressed)


class Retries(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often cudaMalloc is retried in a training step; `fails`: the last retry failed too."""

    per_step: int = 0
    fails: bool = False


def retries(problem: Problem, plan: Plan, evaluation: PlanEvaluation) -> Retries | None:
    """The allocator retries of the fullest rank in the second of two whole training steps. The
    first step begins with an empty cache. None where no allocator was modelled; the cost of a retry
    is modelled nowhere."""
    if evaluation.pressed is None:
        return None
    if not evaluation.pressed:
        return Retries()
    rank, program = fullest_rank(evaluation.ranks), lower(plan, problem)
    held = evaluation.ranks[rank]
    found = replayed(program, rank, held, problem.usable_bytes, whole=True)
    return Retries(per_step=found.retries, fails=found.oom_at is not None)


def judge(problem: Problem, evaluation: PlanEvaluation) -> Verdict:
    """The verdict on device and host memory of a plan's evaluation."""
    held, pinned = evaluation.reserved_bytes, evaluation.host_node_bytes
    return judged(problem, evaluation.ranks, held, pinned)


def judged(
    problem: Problem, ranks: tuple[RankBytes, ...], reserved_bytes: int, host_node_bytes: int
) -> Verdict:
    """The verdict on device and host memory. The bytes that the fullest rank reserves are held
    against the usable bytes of a device, and a node's pinned bytes against the host memory that the
    system leaves."""
    rank = fullest_rank(ranks)
    device = problem.usable_bytes - reserved_bytes
    host = problem.cost.host_room_bytes - host_node_bytes
    short = []
    if device < 0:
        short.append(f"device memory of pipeline rank {rank}: {_gib(-device)} GiB short")
    if host < 0:
        short.append(f"host memory of a node: {_gib(-host)} GiB short")
    return Verdict(
        fits=not short,
        headroom_bytes=device,
        host_headroom_bytes=host,
        binds="; ".join(short) or "nothing",
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"
