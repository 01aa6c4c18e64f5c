"""Problems from plain inputs, the outcome of one method on a problem, the verdict on memory."""

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from rematbench.choose.candidates import same_plan
from rematbench.cost.constants import Calibration
from rematbench.lowering.lower import lower
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import Composition, MethodError
from rematbench.problem import Problem, Weight
from rematbench.program.allocator import AllocatorPeaks, Mode
from rematbench.program.check import Proof, check
from rematbench.program.program import Program
from rematbench.program.replay import replay
from rematbench.simulate.evaluate import (
    PlanEvaluation,
    RankBytes,
    evaluate_program,
    fullest_rank,
    program_bytes,
)
from rematbench.solve.memory_plan import planned_peak
from rematbench.spec.cluster import Cluster
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


class Reserved(NamedTuple):
    """Bytes that an allocator reserves, and whether it released cached segments for that."""

    nbytes: int
    pressed: bool = False


class Lowered:
    """A plan's program, the bytes of its ranks, and the allocator's peaks on a device with
    unlimited memory, each made once.  No cluster changes them."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        self.held: dict[int, Reserved] = {}  # what `weighed` found, by usable bytes

    @cached_property
    def program(self) -> Program:
        """The lowered plan."""
        return lower(self.plan, self.problem)

    def forget(self, most_actions: int) -> None:
        """Forget a program with more actions in memory, which is lowered again where it is asked
        for."""
        program: Program | None = self.__dict__.get("program")
        if program is not None and program.written > most_actions:
            del self.program

    @cached_property
    def ranks(self) -> tuple[RankBytes, ...]:
        """The bytes of every pipeline rank."""
        return program_bytes(self.problem, self.plan, self.program)

    @property
    def peak_device_bytes(self) -> tuple[int, ...]:
        """The ledger peak of every pipeline rank."""
        return tuple(rank.device_peak for rank in self.ranks)

    @cached_property
    def live_bytes(self) -> int:
        """The largest ledger peak of a device."""
        return max(self.peak_device_bytes)

    @cached_property
    def peaks(self) -> AllocatorPeaks:
        """The allocator's peaks on a device with unlimited memory."""
        rank = fullest_rank(self.ranks)
        return unpressed(self.program, rank, self.ranks[rank])


_LATELY: deque[tuple[Problem, bytes, Lowered]] = deque(maxlen=8)


def lately(problem: Problem, plan: Plan) -> Lowered:
    """The lowered plan.  The last few are kept: a method weighs plans before it asks for the
    seconds of one of them, and notes in `fit` how it chose."""
    key = same_plan(plan)
    for of, content, lowered in _LATELY:
        if of is problem and content == key:
            return lowered
    _LATELY.append((problem, key, Lowered(problem, plan)))
    return _LATELY[-1][-1]


def weighed(problem: Problem, lowered: Lowered, room_bytes: float = inf) -> Reserved:
    """What the allocator of a plan's fullest rank reserves.  A plan with more live bytes than
    `room_bytes` is not replayed: no allocator needs less."""
    if lowered.live_bytes > room_bytes:
        return Reserved(lowered.live_bytes)
    at = problem.usable_bytes
    if at not in lowered.held:
        known = None if lowered.program.planned else lowered.peaks
        lowered.held[at] = reserved(problem, lowered.program, lowered.ranks, known)
    return lowered.held[at]


def timed(problem: Problem, lowered: Lowered, held: Reserved) -> PlanEvaluation:
    """The evaluation of a plan that `weighed` has weighed."""
    found = evaluate_program(problem, lowered.plan, lowered.program, ranks=lowered.ranks)
    return replace(found, reserved_bytes=held.nbytes, pressed=held.pressed)


def unpressed(program: Program, rank: int, held: RankBytes) -> AllocatorPeaks:
    """The allocator peaks of a rank on a device with unlimited memory."""
    return _replayed(program, rank, held, None)


def _replayed(
    program: Program, rank: int, held: RankBytes, capacity_bytes: int | None, *, whole: bool = False
) -> AllocatorPeaks:
    """The allocator peaks of one rank over two training steps: the second finds the segments that
    the first left cached, and may need others.  Of each (unless `whole`) up to twice the passes
    that lead to the peak, and the two that follow: by then the schedule has run for as long as its
    warm-up, more than a period, and the pattern of blocks repeats (tests compare with all passes).
    """
    actions = program.ranks[rank]
    resident = held.blocks(actions.late)
    mode: Mode = "expandable" if program.expandable else "default"
    passes = None if whole else 2 * held.peak_step + 3
    if passes and actions.late:
        passes += 1  # through the second micro-batch, where all gradients are alive
    return replay(actions, resident, capacity_bytes, mode, passes, 2)


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
    found = _replayed(program, rank, held, problem.usable_bytes, whole=True)
    return Retries(per_step=found.retries, fails=found.oom_at is not None)


def reserved(
    problem: Problem,
    program: Program,
    ranks: Sequence[RankBytes],
    known: AllocatorPeaks | None = None,
) -> Reserved:
    """What the fullest rank's allocator reserves, by replay. `known`: the peaks that `unpressed`
    found for that rank."""
    rank = fullest_rank(ranks)
    return rank_reserved(program, rank, ranks[rank], problem.usable_bytes, known)


def rank_reserved(
    program: Program,
    rank: int,
    held: RankBytes,
    usable_bytes: int,
    known: AllocatorPeaks | None = None,
) -> Reserved:
    """What one rank's allocator reserves, by replay.

    `known`: the rank's peaks on a device with unlimited memory. An allocator that reaches the
    usable bytes releases cached segments and tries again: only where the retry fails too is the
    rank out of memory, and then the reserved bytes are those of unlimited memory. Where the plan
    places its activations itself, the bytes of that placement count.
    """
    if program.planned and (planned := planned_peak(program.ranks[rank])):
        return Reserved(held.parameter + held.gradient + held.optimizer + planned)
    found = known or _replayed(program, rank, held, None)
    if found.reserved_bytes > usable_bytes >= found.allocated_bytes:
        pressed = _replayed(program, rank, held, usable_bytes)
        if pressed.oom_at is None:
            return Reserved(pressed.reserved_bytes, pressed=True)
    return Reserved(found.reserved_bytes)


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
