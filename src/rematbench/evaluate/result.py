"""The result of a method on a problem (a row of a table), its job, and the error band of its
speed."""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

import rematbench
from rematbench.evaluate.breakdown import PARTS, losses
from rematbench.evaluate.evaluation import PlanEvaluation, host_node_bytes, rated
from rematbench.evaluate.evaluator import SINGLE_EVALUATOR, Evaluator, evaluate, timed, weighed
from rematbench.evaluate.proof import Proof, check
from rematbench.evaluate.unread import unread
from rematbench.evaluate.verdict import Retries, Verdict, graphs, judge, judged, only_fragmented
from rematbench.host.declared import columns
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.stages import stages_of
from rematbench.inputs.system import System
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import Composition, MethodError
from rematbench.problem import Problem

if TYPE_CHECKING:
    import pandas as pd

Status = Literal["ok", "fragmented", "dropping", "oom", "unsupported", "failed", "timed out"]
"""`fragmented`: out of memory by the allocator's fragmentation alone (`told_fragmented`);
`dropping`: out of memory unless experts with a capacity drop tokens (`_told_dropping`)."""
Fit = Literal["yes", "tight", "expandable", "no"]
FRAGMENTED = "fits with expandable segments, else retries or fails"

DROPPED = 0.25
"""A job counts as too large if its experts must drop more than this share of tokens to fit.  The
number has no source, because nobody publishes how many tokens are dropped; so the verdict also
names the smallest of SHARES with which the job fits."""
SHARES = (0.05, 0.1, 0.15, 0.2, DROPPED)

SPEEDS = ("step_s", "tokens_per_s_per_gpu", "mfu_causal", "mfu_dense", "hfu")
AMOUNTS = ("recompute_flop", "offload_bytes")
ROOMS = ("headroom_bytes", "host_headroom_bytes", "binds")


ALIKE = 0.0005
"""Steps that differ by a smaller share are shown as equal, because shares are printed to 0.1 %."""
LEADING = ("tp", "cp", "pp", "vpp", "dp", "zero_stage", "ulysses", "ep", "etp")
"""The facts of a layout whose columns come first, in this order."""
WORDS: tuple[str, ...] = (*LEADING, "micro_batch", "global_batch")
"""The facts of a layout that every table shows."""


class Band(Struct, frozen=True, kw_only=True):
    """The error band of a predicted speed.  `half_width` is a logarithm.  `outside`: the properties
    of the job that no published row covers, each with its description.  `sources`: the number of
    sources from which the width follows; 0 for a stack that its user calibrated, whose width is
    `evidence.user_fit.band_of_rows`.  `other_generation`: the sources' rows were predicted with the
    kernels of another GPU generation, because nobody has published rows of the job's GPU.
    `open_cause`: the width is that of an error without a known cause, which `outside` describes."""

    half_width: float
    outside: dict[str, str]
    sources: int
    other_generation: bool = False
    open_cause: bool = False

    def low(self, value: float) -> float:
        return value * math.exp(-self.half_width)

    def high(self, value: float) -> float:
        return value * math.exp(self.half_width)

    @property
    def evidence(self) -> str:
        """The kind of evidence in words."""
        if not self.outside:
            return "inside of the published range"
        return f"outside of the published range: {', '.join(self.outside.values())}"


class PlannedJob(Struct, frozen=True, kw_only=True):
    """A problem with the plan from which methods start.  `words`: the command-line options of the
    problem (empty: no options can express it)."""

    problem: Problem
    base: Plan
    words: tuple[str, ...] = ()

    @property
    def uneven_layers(self) -> str:
        """The number of layers of each chunk, in the form of `--partition`; empty for the even
        partition."""
        even = self.base.partition == self.problem.base_plan.partition
        return "" if even else _layers(self)

    def run_with(self, method: str, *more: str) -> str:
        """The command that simulates a method on this job; empty if no options express it."""
        words = ("rematbench", "simulate", method, *self.words, *more)
        return shlex.join(words) if self.words else ""

    def facts(self) -> dict[str, Any]:
        """The facts of the job under the column names of sheets, which tell the rows of joined
        tables apart: model, cluster, stack, layout, sequence length, precision, attention, the date
        of the calibration constants, and the constants and kernels that are assumed."""
        return self.quick_facts() | {"assumes": assumed(self.problem)}

    def quick_facts(self) -> dict[str, Any]:
        """The facts without `assumes`, for which other stacks and networks are simulated."""
        problem = self.problem
        lay, work = problem.layout, problem.workload
        return {
            "model": work.model.name,
            "cluster": problem.cluster.name,
            "gpu": problem.cluster.gpu,
            "system": problem.system.name,
            "gpus": lay.gpus,
            **columns(work),
            **columns(problem.chosen),
            **{name: getattr(lay, name) for name in LEADING},
            **columns(lay),
            "sp": lay.sequence_parallel,
            "precision": work.precision,
            "attention": problem.attention,
            "kernel": problem.kernel,
            "schedule": self.base.schedule,
            "optimizer": self.base.state("optimizer").home,
            "parameters": self.base.state("parameter").home,
            "partition": _layers(self),
            "rematbench": rematbench.__version__,
            "constants": problem.calibration.date,
        }


def _layers(job: PlannedJob) -> str:
    """The number of layers of each chunk in pipeline order, in the form of `--partition`."""
    stages = stages_of(job.base.partition, job.problem.workload.model.num_layers)
    return ",".join(str(len(stage.layers)) for stage in stages)


class Result(Struct, frozen=True, kw_only=True):
    """The result of a method on a problem.

    `method` is the text that `simulate` takes; `family` has the names of its methods' mechanisms
    without parameters, joined by `+`; `origin` says why a table has the row (`compare`'s
    candidates). A plan may fit without a modelled time: its status is ok, its bytes are valid, it
    has no speeds, and the reason says why (`not_timed`). A table fills in the fields after `proof`
    if it needs them: `error_band` is the error of the speed, `fit` a word for the headroom, `tied`
    whether the error of ratios of speeds is too large to tell the result from the fastest,
    `parts_s` the seconds of the step by part, `runs_on` the engines that can run the plan,
    `same_as` an earlier result with an equal plan, `bound_s` a lower bound of the step.
    """

    job: PlannedJob
    method: str
    family: str
    origin: str = ""
    status: Status
    reason: str = ""
    plan: Plan | None = None
    evaluation: PlanEvaluation | None = None
    verdict: Verdict | None = None
    proof: Proof | None = None
    error_band: Band | None = None
    fit: Fit = "no"
    tied: bool = False
    parts_s: dict[str, float] = {}
    retries: Retries | None = None
    runs_on: tuple[str, ...] = ()
    same_as: str = ""
    bound_s: float = 0.0

    def __repr__(self) -> str:
        """Return a short line for notebooks, where all fields would fill pages."""
        names = ("status", "reason", "step_s", "tokens_per_s_per_gpu", "headroom_bytes")
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"Result(method={self.method!r}, {values})"

    @property
    def problem(self) -> Problem:
        return self.job.problem

    @property
    def base(self) -> Plan:
        return self.job.base

    @property
    def fits(self) -> bool:
        return self.status == "ok"

    @property
    def not_timed(self) -> str:
        """Why the time of the plan's step is not modelled; empty if it is, or without a plan."""
        return self.evaluation.not_timed if self.evaluation else ""

    @property
    def timed(self) -> PlanEvaluation | None:
        """The evaluation, if its seconds are modelled."""
        return None if self.not_timed else self.evaluation

    @property
    def step_s(self) -> float | None:
        """Seconds of the step.  If the plan does not fit, the seconds that it would take."""
        return self.timed.step_s if self.timed else None

    @property
    def fitting_s(self) -> float:
        """Seconds of the step; infinite if the plan does not fit or its time is not modelled."""
        return self.timed.step_s if self.fits and self.timed else float("inf")

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        return self.timed.tokens_per_s_per_gpu if self.timed else None

    @property
    def gpu_hours_per_1e9_tokens(self) -> float | None:
        """GPU-hours to train on 1e9 tokens; None without a speed."""
        rate = self.tokens_per_s_per_gpu
        return 1e9 / rate / 3600 if rate else None

    @property
    def headroom_bytes(self) -> int | None:
        """Usable minus needed bytes of the fullest device; negative if the plan does not fit."""
        return self.verdict.headroom_bytes if self.verdict else None

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that the allocator of the fullest device reserves."""
        return self.problem.usable_bytes - self.verdict.headroom_bytes if self.verdict else None

    @property
    def device_total_bytes(self) -> int | None:
        """Bytes of the fullest device that a process takes: the reserved bytes, the CUDA context
        and the communicators."""
        return self.problem.room_bytes - self.verdict.headroom_bytes if self.verdict else None

    @property
    def host_node_bytes(self) -> int | None:
        """Pinned bytes of the fullest node."""
        room_bytes = self.problem.cost.host_room_bytes
        return room_bytes - self.verdict.host_headroom_bytes if self.verdict else None

    @property
    def band(self) -> tuple[float, float] | None:
        """(low, high) tokens/s/GPU: the interval that holds 80 % of published rows."""
        speed, band = self.tokens_per_s_per_gpu, self.error_band
        return (band.low(speed), band.high(speed)) if speed and band else None

    @property
    def outside(self) -> tuple[str, ...]:
        """The properties of this job that lie outside the range of the published rows, in words."""
        return tuple(self.error_band.outside.values()) if self.error_band else ()

    @property
    def command(self) -> str:
        """The shell command of this result; empty if no command can express the problem."""
        return self.job.run_with(self.method)

    @property
    def losses(self) -> str:
        """The largest losses of the step, in words; empty if its parts have no seconds."""
        if not self.parts_s:
            return ""
        step_s = self.step_s or 1.0
        return losses({part: seconds / step_s for part, seconds in self.parts_s.items()})

    def stages(self) -> "pd.DataFrame":
        """A table of bytes: one row for each pipeline rank, one column for each kind of memory."""
        import pandas as pd  # noqa: PLC0415  # other commands then start sooner

        ranks = self.evaluation.ranks if self.evaluation else ()
        names = ("parameter", "gradient", "optimizer", "activation_peak", "pools")
        peaks = ("device_peak", "host_peak")
        rows = [{f"{n}_bytes": getattr(rank, n) for n in (*names, *peaks)} for rank in ranks]
        return pd.DataFrame(rows, columns=[f"{n}_bytes" for n in (*names, *peaks)])

    def row(self) -> dict[str, Any]:
        """Return every number in base SI units and fractions, under the column names of all tables;
        a number that the result lacks is None.  If the plan does not fit, the speeds are those that
        it would have if it did."""
        return self.quick_row() | {"assumes": assumed(self.problem), "run_with": self.command}

    def quick_row(self) -> dict[str, Any]:
        """The row without `assumes` and `run_with`."""
        evaluation, (low, high) = self.evaluation, self.band or (None, None)
        notes = self.plan.fit if self.plan else {}
        return {
            "name": self.method,
            "status": self.status,
            "reason": self.reason,
            **{key: getattr(self.timed, key, None) for key in SPEEDS},
            "gpu_hours_per_1e9_tokens": self.gpu_hours_per_1e9_tokens,
            "peak_device_bytes": max(evaluation.peak_device_bytes) if evaluation else None,
            **{key: getattr(evaluation, key, None) for key in AMOUNTS},
            "reserved_bytes": self.reserved_bytes,
            "device_total_bytes": self.device_total_bytes,
            "host_node_bytes": self.host_node_bytes,
            **{key: getattr(self.verdict, key, None) for key in ROOMS},
            "usable_bytes": self.problem.usable_bytes,
            "allocator_retries": self.retries and self.retries.per_step,
            "allocator_fails": self.retries and self.retries.fails,
            **{f"{part}_s": self.parts_s.get(part) for part in PARTS},
            "plan": "; ".join(f"{key}={value}" for key, value in notes.items()),
            "fits": self.fit,
            "low_tokens_per_s_per_gpu": low,
            "high_tokens_per_s_per_gpu": high,
            "outside": ", ".join(self.error_band.outside) if self.error_band else "",
            "evidence": self.error_band.evidence if self.error_band else "",
            "tied_with_best": self.tied,
            "same_as": self.same_as,
            "runs_on": " ".join(self.runs_on),
            "bound_s": self.bound_s,
            "losses": self.losses,
            **self.job.quick_facts(),
        }

    def line(self, columns: Sequence[str], **more: Any) -> dict[str, Any]:
        """A line of a table: `columns` of `row` and of `more`, the facts of the job, and the
        command."""
        values, facts = self.row() | more, self.job.quick_facts()
        return {key: values[key] for key in (*columns, *facts, "assumes", "run_with")}


def evaluate_method(
    problem: Problem,
    method: Composition,
    base: Plan | None = None,
    *,
    checked: bool = False,
    words: tuple[str, ...] = (),
    text: str = "",
    shared: Evaluator | None = None,
) -> Result:
    """Return the result of a method on a problem.  `checked`: also prove that the lowered program
    is safe.  `words`: the options of the problem; `text`: the method's name as the user typed it.
    If problems share the evaluator (`shared`), the step of a plan that does not fit is not
    simulated, so its result has a verdict but no evaluation."""
    if shared is not None:
        problem = dataclasses.replace(problem, evaluator=shared.evaluate, weigher=shared.weigh)
    job = PlannedJob(problem=problem, base=problem.base_plan if base is None else base, words=words)
    blank = Result(job=job, method=text or method.text, family=method.family, status="failed")
    try:
        plan = method.plan(problem, base)
        if isinstance(plan, Unsupported):
            return replace(blank, status="unsupported", reason=plan.reason)
        verdict = _weighed(problem, plan, shared) if shared is not None else None
        if verdict and not verdict.fits:
            return replace(blank, status="oom", reason=verdict.binds, plan=plan, verdict=verdict)
        return of_plan(blank, plan, checked=checked)
    except (PlanError, LayoutError) as error:
        return replace(blank, reason=f"{method.name}: {error}")
    except RateError as error:
        return replace(blank, status="unsupported", reason=needs_seconds(method.name, error))
    except MethodError as error:
        return replace(blank, reason=str(error))


def needs_seconds(name: str, error: RateError) -> str:
    """Return why a method that plans by seconds has no plan if kernels have no rates."""
    return f"{name}: the method plans by seconds; {error}"


def _weighed(problem: Problem, plan: Plan, shared: Evaluator) -> Verdict:
    """The verdict on a plan, without a simulation of its step."""
    ranks = shared.lowered(problem, plan).ranks
    reserved_bytes = shared.reserved(problem, plan).nbytes
    return judged(problem, ranks, reserved_bytes, host_node_bytes(problem, ranks))


def evaluate_plan(problem: Problem, plan: Plan, *, checked: bool = False) -> Result:
    """Return the result of a plan without a method.  Raise PlanError if the plan cannot be
    lowered."""
    job = PlannedJob(problem=problem, base=problem.base_plan)
    return of_plan(Result(job=job, method="", family="", status="failed"), plan, checked=checked)


def of_plan(blank: Result, plan: Plan, *, checked: bool = False) -> Result:
    """Return the result of the method of `blank`, whose plan is `plan`."""
    problem, proof = blank.problem, None
    if checked:
        lowered = SINGLE_EVALUATOR.lowered(problem, plan)
        proof = check(lowered.program)
        evaluation = timed(problem, lowered, weighed(problem, lowered))
    else:
        numbers = problem.cost.evaluate(plan)
        assert isinstance(numbers, PlanEvaluation)
        evaluation = numbers
    verdict = judge(problem, evaluation)
    return replace(
        blank,
        status="ok" if verdict.fits else "oom",
        reason=evaluation.not_timed if verdict.fits else verdict.binds,
        plan=plan,
        evaluation=evaluation,
        verdict=verdict,
        proof=proof,
    )


def at_middle_rate(result: Result) -> Result:
    """The result. If its node has no host rate, its seconds are those of the problem that `rated`
    returns."""
    if result.plan is None or not result.not_timed:
        return result
    there = rated(result.problem, result.plan)
    if there is result.problem:
        return result
    reason = result.reason * (not result.fits)
    return replace(result, evaluation=evaluate(there, result.plan), reason=reason)


def told_fragmented(result: Result) -> Result:
    """Return the result. Its status and reason change if only the allocator's fragmentation keeps
    the plan from fitting, or if it fits once experts with a capacity drop tokens."""
    plan, evaluation, verdict = result.plan, result.evaluation, result.verdict
    if result.status != "oom" or plan is None or evaluation is None or verdict is None:
        return result
    problem = result.problem
    if verdict.host_headroom_bytes < 0 or not only_fragmented(problem, plan, evaluation):
        return _told_dropping(result, problem, plan) if problem.workload.drops_tokens else result
    binds = f"{FRAGMENTED}: {verdict.binds} with the stack's segments"
    verdict = replace(verdict, binds=binds, expandable=True)
    return replace(result, status="fragmented", reason=binds, verdict=verdict)


def _told_dropping(result: Result, problem: Problem, plan: Plan) -> Result:
    """The result, with another status and reason if it fits once experts drop tokens."""
    verdict = _dropping(problem, plan, DROPPED)
    if not verdict.fits:
        return result
    least = next(share for share in SHARES if _dropping(problem, plan, share).fits)
    left = f"{verdict.headroom_bytes / 2**30:.2f} GiB of headroom"
    reason = f"{left} if experts drop {DROPPED:.0%} of their tokens ({least:.0%} is enough)"
    return replace(result, status="dropping", reason=f"{reason}; if none, {result.reason}")


def _dropping(problem: Problem, plan: Plan, share: float) -> Verdict:
    """The verdict on a plan whose experts drop a share of their tokens."""
    kept = problem.workload.capacity_factor * (1.0 - share)
    work = replace(problem.workload, capacity_factor=kept)
    fewer = problem.remade(workload=work)
    return _weighed(fewer, plan, SINGLE_EVALUATOR)


# -- what a job assumes --------------------------------------------------------------------------


def assumed(problem: Problem) -> str:
    """Return the kernels and the fitted constants that a prediction assumes, in one line.  Kernels
    that the model does not run (RoPE, a gated activation) are left out."""
    generation, network, stack = problem.constants
    model, system = problem.workload.model, problem.system
    native = model.norm == "layernorm" and not model.norm_in_fp32
    eager = "eager (of experts fused)" if model.experts else "eager"
    kernels = {
        "attention": problem.kernel + " with its sinks" * model.attention_sinks,
        "norm": "fused" if native else system.norm_kernel,
        "RoPE": system.rope_kernel if model.position == "rope" else "",
        "activation": ("fused" if system.kernels.fused_swiglu else eager) if model.gated else "",
        "loss": _loss(system),
        "CUDA graphs": graphs(problem),
    }
    named = ", ".join(f"{key} {kernel}" for key, kernel in kernels.items() if kernel)
    text = f"{named}, on {generation}; constants of cluster {network}, stack {stack}"
    balance = problem.workload.balance
    return "; ".join(part for part in (text, balance, unread(problem), model.left_out) if part)


def _loss(system: System) -> str:
    """`fused`, `in place` (the saved softmax becomes the gradient) or `eager`."""
    if system.loss.fused_loss:
        return "fused"
    return "in place" if system.loss.loss_in_place else "eager"
