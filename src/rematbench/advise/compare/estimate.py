"""Whether a job fits: its verdict, device bytes by rank and kind, and what would make it fit."""

from collections.abc import Iterator, Mapping
from math import exp
from typing import Any

from msgspec import Struct

from rematbench.advise.compare.would_fit import would_fit
from rematbench.costs.states import PARAMETER_STAGE
from rematbench.evaluate.evaluation import fullest_rank
from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import PlannedJob, Result, evaluate_method, told_fragmented
from rematbench.evidence.bands import with_band
from rematbench.evidence.peaks import ABOUT, leaving_reserve, margin, trains_in
from rematbench.host.console import gib
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.job import DEFAULT_SYSTEM, SHARDED_SYSTEM, Job, flag
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import LayoutError
from rematbench.plugins.registry import MethodError, Registry

METHODS = ("selective_recompute", "balanced_checkpointing", "full_recompute", "full_recompute+mst")
"""Methods to try if a job does not fit, in the order of their usual cost (our judgement)."""
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "fragmentation",
         "context")  # fmt: skip
"""The kinds of device bytes on a rank.  Only the fullest rank has the last two, because the
allocator is replayed only there."""


class Estimate(Struct, frozen=True, kw_only=True):
    """The answer for a job.  `ranks`: bytes by kind on each pipeline rank; `headroom_bytes`: free
    bytes of the fullest rank, negative if the job does not fit; `margin_bytes`: in 80 % of sources,
    published device totals exceed predicted ones by no more than this; `why`: what fills the
    fullest rank; `options`: changes with which the job would fit (empty if it fits with its
    margin)."""

    verdict: str
    fits: bool
    headroom_bytes: int
    margin_bytes: int
    ranks: tuple[dict[str, int], ...]
    why: str
    options: tuple[str, ...]
    command: str
    result: Result

    def __str__(self) -> str:
        """The verdict, what fills the fullest rank, and what would fit, a line each."""
        return "\n".join((self.verdict, f"why: {self.why}", *self.options))


def estimate_job(spec: Job, method: str, registry: Registry) -> Estimate:
    """The estimate of a method on a job.  ConfigError, LayoutError, RateError or MethodError for a
    wrong job; ConfigError for a method without a plan."""
    result = _run(spec, method, registry)
    evaluation, verdict = result.evaluation, result.verdict
    if evaluation is None or verdict is None:
        raise ConfigError("", method, result.reason)
    problem, full = result.problem, fullest_rank(evaluation.ranks)
    total = result.device_total_bytes or 0
    ranks = [
        dict(zip(KINDS, (rank.parameter, rank.gradient_at_peak, rank.optimizer,
                         rank.activation_peak, rank.pools), strict=False))
        for rank in evaluation.ranks
    ]  # fmt: skip
    peak = evaluation.ranks[full].device_peak
    ranks[full] |= {KINDS[5]: evaluation.reserved_bytes - peak}
    ranks[full] |= {KINDS[6]: total - evaluation.reserved_bytes}
    largest = sorted(ranks[full].items(), key=lambda pair: -pair[1])[:3]
    held = ", ".join(f"{kind} {gib(nbytes)}" for kind, nbytes in largest)
    word = {"yes": "FITS", "tight": "FITS, TIGHT"}.get(result.fit, "OUT OF MEMORY")
    short = verdict.headroom_bytes < 0
    room = f"{gib(abs(verdict.headroom_bytes))} GiB {'short' if short else 'left'}"
    margin_bytes = round(total * (exp(margin(ABOUT, trains_in(problem))) - 1))
    said = f"of {gib(problem.room_bytes)} GiB on rank {full}, margin {gib(margin_bytes)} GiB"
    if margin_bytes <= verdict.headroom_bytes < problem.reserve_bytes:
        said = f"{said}; below {gib(problem.reserve_bytes)} GiB a plan is called tight"
    return Estimate(
        verdict=f"{word}: {room} {said}" if result.fits or short else f"{word}: {result.reason}",
        fits=result.fits,
        headroom_bytes=verdict.headroom_bytes,
        margin_bytes=margin_bytes,
        ranks=tuple(ranks),
        why=f"{gib(total)} GiB on rank {full}: {held} GiB",
        options=() if result.fit == "yes" else tuple(_options(spec, result, registry)),
        command=result.command,
        result=result,
    )


def _options(spec: Job, result: Result, registry: Registry) -> Iterator[str]:
    """Changes with which the job fits with its margin, a line each: another method, micro-batch 1
    or sharded states, alone or with full recomputation; if none helps, those of `would_fit`."""
    layout = result.problem.layout
    zeros = [stage for stage in (1, 2, 3) if stage > layout.zero_stage and layout.has_peers]
    changes = [("micro_batch", 1)] * (layout.micro_batch > 1)
    changes += [("zero_stage", stage) for stage in zeros]
    tried: list[tuple[str, dict[str, int]]] = [(method, {}) for method in METHODS]
    tried += [(result.method, {key: value}) for key, value in changes]
    tried += [(METHODS[2], {key: value}) for key, value in changes]
    count, missed = 0, [result]
    for method, facts in tried:
        try:
            item = _run(spec.changed(**facts), method, registry)
        except (ConfigError, LayoutError, MethodError, RateError):
            continue
        if item.fit == "yes" and count < len(METHODS):
            count += 1
            words = [f"{flag(key)} {value}" for key, value in facts.items()]
            words += [method] * (method != result.method)
            slower = _slower(item, result)
            yield f"would fit: {', '.join(words)}: {gib(item.headroom_bytes or 0)} GiB left{slower}"
        missed += [item] * (not facts)
    if not count:
        yield from (f"would fit: {one}" for one in would_fit(result.problem, missed, registry))


def _slower(item: Result, result: Result) -> str:
    """How much longer a step takes, in words; empty if time is not modelled."""
    if not item.step_s or not result.step_s:
        return ""
    share = 100 * (item.step_s / result.step_s - 1)
    return f", step {share:+.0f} %"


def job_of(model: str, facts: Mapping[str, Any]) -> Job:
    """The job of a model with `facts`; by default one GPU, the default stack, and as many
    micro-batches as the pipeline has stages."""
    usual = SHARDED_SYSTEM if facts.get("zero_stage") == PARAMETER_STAGE else DEFAULT_SYSTEM
    job = Job(**{"gpus": 1, "system": usual, "global_batch": 1, **facts, "model": model})
    lay = job.layout
    batch = facts.get("global_batch") or lay.replicas * lay.micro_batch * lay.pp
    return job.changed(global_batch=batch)


def planned(spec: Job) -> PlannedJob:
    """The job for planning, in which methods leave the margin of predicted peaks free."""
    problem = leaving_reserve(make_problem(spec))
    try:
        words = tuple(spec.to_arguments())
    except ConfigError:  # a model, cluster or system given as an object has no name to type
        words = ()
    return PlannedJob(problem=problem, base=problem.base_plan, words=words)


def _run(spec: Job, method: str, registry: Registry) -> Result:
    job = planned(spec)
    found = registry.resolve(method, None, job.problem)
    result = evaluate_method(job.problem, found, job.base, words=job.words, text=method)
    return with_band(told_fragmented(result))
