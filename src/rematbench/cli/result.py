"""The JSON of a run: its outcome, compared with keep_all's."""

from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from rematbench.advise.compare.judged import run_band
from rematbench.cli.options import Request
from rematbench.evaluate.band import Band
from rematbench.evaluate.evaluation import PlanEvaluation
from rematbench.evaluate.result import Result
from rematbench.evaluate.verdict import Retries, retries
from rematbench.evidence.bands import fits_word


class ShownRun(Struct, frozen=True, kw_only=True):
    """A run, its outcome, and the evaluation of keep_all on the same problem (None: no plan)."""

    request: Request
    outcome: Result
    keep_all: PlanEvaluation | None = None


def result(shown: ShownRun) -> dict[str, Any]:
    """The JSON of a run; values are null where there is no plan to evaluate."""
    outcome = shown.outcome
    evaluation, verdict = outcome.evaluation, outcome.verdict
    speeds = ("step_s", "tokens_per_s_per_gpu", "mfu_causal", "mfu_dense", "hfu")
    timed = None if evaluation is None or evaluation.not_timed else evaluation
    values: dict[str, Any] = {key: getattr(timed, key, None) for key in speeds}
    peaks = evaluation.peak_device_bytes if evaluation else None
    values["peak_device_bytes"] = peaks and {"per_rank": list(peaks), "max": max(peaks)}
    values["peak_host_bytes"] = max(evaluation.peak_host_bytes) if evaluation else None
    values["recompute_flop"] = evaluation.recompute_flop if evaluation else None
    values["offload_bytes"] = evaluation.offload_bytes if evaluation else None
    values["parameters"] = resolved_parameters(shown)
    values["headroom_bytes"] = verdict.headroom_bytes if verdict else None
    values["fits"] = fits(shown)
    values["band"] = timed and band_result(shown_band(shown), timed.tokens_per_s_per_gpu)
    values["binds"] = verdict.binds if verdict else None
    values["allocator_retries"] = asdict(tried) if (tried := retries_of(shown)) else None
    job, method = shown.request.job, shown.request.method
    values["job"] = {"method": method.name, **job.facts()}
    values["run_with"] = shown.request.run_with
    if outcome.proof is not None:
        values["proof"] = asdict(outcome.proof)
    return {**values, "status": outcome.status, "reason": outcome.reason}


def band_result(band: Band, speed: float) -> dict[str, Any]:
    """The JSON of a band: its ends in tokens/s/GPU, and what lies outside of published rows."""
    return {"low": band.low(speed), "high": band.high(speed), "outside": list(band.outside)}


def fits(shown: ShownRun) -> str | None:
    """Whether the plan fits: yes, tight or no; None without a plan."""
    verdict = shown.outcome.verdict
    if verdict is None:
        return None
    usable = shown.request.problem.usable_bytes
    return fits_word(verdict.headroom_bytes, usable) if verdict.fits else "no"


def resolved_parameters(shown: ShownRun) -> dict[str, Any]:
    """The method's parameters, and the numbers that the plan derived (alpha, ...)."""
    plan = shown.outcome.plan
    found = dict(plan.fit) if plan else {}
    return {**shown.request.method.parameters, **found}


def retries_of(shown: ShownRun) -> Retries | None:
    """The allocator's retries in a step; None without a plan."""
    plan, evaluation = shown.outcome.plan, shown.outcome.evaluation
    if plan is None or evaluation is None:
        return None
    return retries(shown.request.problem, plan, evaluation)


def shown_band(shown: ShownRun) -> Band:
    """The 80 % band of the run's speed."""
    asked = shown.request
    return run_band(asked.problem, asked.method.name, shown.outcome.plan, asked.base)
