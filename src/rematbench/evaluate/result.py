"""The result of one method on one problem: a row of a table in every case."""

from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from rematbench.evaluate.band import Band
from rematbench.evaluate.breakdown import PARTS, losses
from rematbench.evaluate.evaluation import PlanEvaluation
from rematbench.evaluate.evaluator import SINGLE_EVALUATOR, timed
from rematbench.evaluate.job import Job
from rematbench.evaluate.lowered import weighed
from rematbench.evaluate.proof import Proof, check
from rematbench.evaluate.verdict import Retries, Verdict, judge
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import Composition, MethodError
from rematbench.problem import Problem
from rematbench.spec.layout import LayoutError

if TYPE_CHECKING:
    import pandas as pd

Status = Literal["ok", "oom", "unsupported", "failed", "timed out"]
Fit = Literal["yes", "tight", "no"]

SPEEDS = ("step_s", "tokens_per_s_per_gpu", "mfu_causal", "mfu_dense", "hfu")
AMOUNTS = ("recompute_flop", "offload_bytes", "reserved_bytes", "host_node_bytes")
ROOMS = ("headroom_bytes", "host_headroom_bytes", "binds")


class Result(Struct, frozen=True, kw_only=True):
    """One method on one problem.

    `method` is the text that `simulate` takes; `family` has the names of its methods without their
    parameters, joined by `+`.  An unsupported plan may have an evaluation: its bytes hold, its
    seconds do not (`not_timed` is the reason).  The fields after `proof` are filled in where a
    table asks for them: `error_band` is the error of the speed, `fit` a word for the headroom,
    `tied` whether the error of ratios of speeds cannot tell the result from the fastest, `parts_s`
    the seconds of the step by part, `runs_on` the engines that can run the plan, `same_as` an
    earlier result with an equal plan, `bound_s` a lower bound of the step.
    """

    job: Job
    method: str
    family: str
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
        """A short line for notebooks: the fields of the problem and the plan would fill pages."""
        names = ("status", "reason", "step_s", "tokens_per_s_per_gpu", "headroom_bytes")
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"Result(method={self.method!r}, {values})"

    @property
    def problem(self) -> Problem:
        """The problem that the method planned."""
        return self.job.problem

    @property
    def base(self) -> Plan:
        """The plan that the method changed."""
        return self.job.base

    @property
    def fits(self) -> bool:
        """Whether the plan fits device and host memory, and its step is modelled."""
        return self.status == "ok"

    @property
    def step_s(self) -> float | None:
        """Seconds of the step; where the plan does not fit, the seconds it would take."""
        return self.evaluation.step_s if self.evaluation else None

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """Training tokens per second and GPU."""
        return self.evaluation.tokens_per_s_per_gpu if self.evaluation else None

    @property
    def gpu_hours_per_1e9_tokens(self) -> float | None:
        """GPU-hours to train on 1e9 tokens; None without a speed."""
        rate = self.tokens_per_s_per_gpu
        return 1e9 / rate / 3600 if rate else None

    @property
    def headroom_bytes(self) -> int | None:
        """Usable minus needed bytes of the fullest device; negative where the plan does not fit."""
        return self.verdict.headroom_bytes if self.verdict else None

    @property
    def band(self) -> tuple[float, float] | None:
        """(low, high) tokens per second and GPU: 80 % of such predictions lie between the two."""
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
        """The largest losses of the step, as shares, in words."""
        step_s = self.step_s or 1.0
        return losses({part: seconds / step_s for part, seconds in self.parts_s.items()})

    def stages(self) -> "pd.DataFrame":
        """A table of bytes: one row for each pipeline rank, one column for each kind of memory."""
        import pandas as pd  # noqa: PLC0415  # a command that needs no such table starts sooner

        ranks = self.evaluation.ranks if self.evaluation else ()
        names = ("parameter", "gradient", "optimizer", "activation_peak", "pools")
        peaks = ("device_peak", "host_peak")
        rows = [{f"{n}_bytes": getattr(rank, n) for n in (*names, *peaks)} for rank in ranks]
        return pd.DataFrame(rows, columns=[f"{n}_bytes" for n in (*names, *peaks)])

    def row(self) -> dict[str, Any]:
        """Every number in base SI units and fractions, under the column names of all tables; None
        where the result has no such number.  The speeds of a plan that does not fit are those that
        it would have if it did."""
        evaluation, (low, high) = self.evaluation, self.band or (None, None)
        notes = self.plan.fit if self.plan else {}
        return {
            "name": self.method,
            "status": self.status,
            "reason": self.reason,
            **{key: getattr(evaluation, key, None) for key in SPEEDS},
            "gpu_hours_per_1e9_tokens": self.gpu_hours_per_1e9_tokens,
            "peak_device_bytes": max(evaluation.peak_device_bytes) if evaluation else None,
            **{key: getattr(evaluation, key, None) for key in AMOUNTS},
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
            **self.job.facts(),
            "run_with": self.command,
        }


def evaluate_method(
    problem: Problem,
    method: Composition,
    base: Plan | None = None,
    *,
    checked: bool = False,
    words: tuple[str, ...] = (),
    text: str = "",
) -> Result:
    """The result of a method on a problem; `checked` also proves the lowered program safe.
    `words` are the options of the problem, `text` the method's name as the user typed it."""
    job = Job(problem=problem, base=problem.base_plan if base is None else base, words=words)
    blank = Result(job=job, method=text or method.text, family=method.name, status="failed")
    try:
        plan = method.plan(problem, base)
        if isinstance(plan, Unsupported):
            return replace(blank, status="unsupported", reason=plan.reason)
        return of_plan(blank, plan, checked=checked)
    except (PlanError, LayoutError) as error:
        return replace(blank, reason=f"{method.name}: {error}")
    except MethodError as error:
        return replace(blank, reason=str(error))


def evaluate_plan(problem: Problem, plan: Plan, *, checked: bool = False) -> Result:
    """The result of a plan without a method.  Raises PlanError if the plan cannot be lowered."""
    job = Job(problem=problem, base=problem.base_plan)
    return of_plan(Result(job=job, method="", family="", status="failed"), plan, checked=checked)


def of_plan(blank: Result, plan: Plan, *, checked: bool = False) -> Result:
    """The result of `blank`'s method, which decided `plan`."""
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
    status: Status = "ok" if verdict.fits else "oom"
    reason = verdict.binds if not verdict.fits else evaluation.not_timed
    if verdict.fits and evaluation.not_timed:
        status = "unsupported"
    return replace(
        blank,
        status=status,
        reason="" if status == "ok" else reason,
        plan=plan,
        evaluation=evaluation,
        verdict=verdict,
        proof=proof,
    )
