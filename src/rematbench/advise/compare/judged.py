"""Entries with the bands of their errors, and every number of an entry as a line of a table."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from rematbench.advise.compare.entry import Compared, Entry
from rematbench.evaluate.band import Band
from rematbench.evaluate.breakdown import PARTS
from rematbench.evaluate.job import Job
from rematbench.evaluate.lowered import same_plan
from rematbench.evidence.bands import band_of, fits_word, ratio_band
from rematbench.plan import Plan
from rematbench.plugins.registry import IDENTITY
from rematbench.problem import Problem
from rematbench.spec.configfile import ConfigError, wrong_field
from rematbench.worlds.packages.flags import Engines

Amount = Annotated[float, Meta(ge=0.0, le=1e30)]


class Judged(Struct, frozen=True):
    """An entry with the band of its speed and a word for its fit (yes, tight, no). `tied`: the
    entry is slower than the fastest by less than the error of ratios of speeds."""

    entry: Entry
    band: Band
    fits: str
    tied: bool = False


class Order(Struct, frozen=True, kw_only=True):
    """The tokens to be trained and the `price` of one GPU-hour; zero where a person gave none."""

    tokens: Amount = 0.0
    price: Amount = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a value outside its bounds, or a price without tokens."""
        wrong = wrong_field(self, Order)
        if wrong is not None:
            raise ConfigError("", *wrong)
        if self.price and not self.tokens:
            raise ConfigError("", "price", "has no cost without tokens")

    def days(self, entry: Entry, gpus: int) -> float | None:
        """Days that training on all tokens takes on all GPUs; None without a number of tokens."""
        hours = self._gpu_hours(entry)
        return None if hours is None else hours / gpus / 24

    def cost(self, entry: Entry) -> float | None:
        """The price of the GPU-hours for all tokens; None where tokens or price are not given."""
        hours = self._gpu_hours(entry)
        return None if hours is None or not self.price else hours * self.price

    def _gpu_hours(self, entry: Entry) -> float | None:
        each = entry.gpu_hours_per_1e9_tokens
        return each * self.tokens / 1e9 if each and self.tokens else None


def run_band(problem: Problem, family: str, plan: Plan | None, base: Plan) -> Band:
    """The band of a run's speed; a plan that changes nothing has the band of keep_all."""
    idle = plan is not None and same_plan(plan) == same_plan(base)
    return band_of(problem, IDENTITY if idle else family)


def judge(found: Compared, problem: Problem) -> list[Judged]:
    """Entries with their bands, a word for each fit, and a mark on those that tie with the fastest.
    An entry whose plan equals an earlier plan has the band of that plan."""
    family = {entry.name: entry.candidate.family for entry in found.entries}
    judged = []
    for entry in found.entries:
        name, room = family.get(entry.same_as, entry.candidate.family), entry.verdict
        fits = "no"
        if room is not None and room.fits:
            fits = fits_word(room.headroom_bytes, problem.usable_bytes)
        judged.append(Judged(entry, band_of(problem, name), fits))
    return tied(judged, ratio_band())


def tied(judged: Sequence[Judged], half_width: float) -> list[Judged]:
    """Mark the fitting entries that are slower than the fastest by less than the error of ratios.
    `half_width` is the error of ratios of speeds at one layout, a logarithm."""
    best = next((item for item in judged if item.entry.status == "ok"), None)
    if best is None:
        return list(judged)
    least = _speed(best.entry) * math.exp(-half_width)
    return [
        replace(item, tied=True)
        if item.entry.status == "ok" and item is not best and _speed(item.entry) >= least
        else item
        for item in judged
    ]


def _speed(entry: Entry) -> float:
    assert entry.evaluation is not None
    return entry.evaluation.tokens_per_s_per_gpu


def lines(
    judged: Sequence[Judged], job: Job, engines: Engines, order: Order
) -> list[dict[str, Any]]:
    """Every number of every entry with the facts of the job: each line is complete in itself."""
    facts, host_bytes = job.facts(), job.problem.cluster.host_bytes
    return [
        {
            **line(item),
            "host_bytes": host_bytes,
            "runs_on": " ".join(engines.of(item.entry.plan)) if item.entry.plan else "",
            "days": order.days(item.entry, job.problem.layout.gpus),
            "cost": order.cost(item.entry),
            **facts,
            "run_with": job.run_with(item.entry.name),
        }
        for item in judged
    ]


def line(item: Judged) -> dict[str, Any]:
    """Every number of an entry in base SI units and fractions; None where the entry has no such
    number. The speeds of a plan that does not fit are the speeds that it would have if it did."""
    entry = item.entry
    evaluation, verdict = entry.evaluation, entry.verdict
    speeds = ("step_s", "tokens_per_s_per_gpu", "mfu_causal", "mfu_dense", "hfu")
    amounts = ("recompute_flop", "offload_bytes", "reserved_bytes", "host_node_bytes")
    rooms = ("headroom_bytes", "host_headroom_bytes", "binds")
    speed = evaluation.tokens_per_s_per_gpu if evaluation else None
    return {
        "name": entry.name,
        "origin": entry.candidate.origin,
        "same_as": entry.same_as,
        "status": entry.status,
        "reason": entry.reason,
        **{key: getattr(evaluation, key, None) for key in speeds},
        "gpu_hours_per_1e9_tokens": entry.gpu_hours_per_1e9_tokens,
        "peak_device_bytes": max(evaluation.peak_device_bytes) if evaluation else None,
        **{key: getattr(evaluation, key, None) for key in amounts},
        **{key: getattr(verdict, key, None) for key in rooms},
        "allocator_retries": entry.retries and entry.retries.per_step,
        "allocator_fails": entry.retries and entry.retries.fails,
        **{f"{part}_s": entry.parts_s.get(part) for part in PARTS},
        "plan": "; ".join(f"{k}={v}" for k, v in (entry.plan.fit if entry.plan else {}).items()),
        "fits": item.fits,
        "low_tokens_per_s_per_gpu": speed and item.band.low(speed),
        "high_tokens_per_s_per_gpu": speed and item.band.high(speed),
        "outside": ", ".join(item.band.outside),
        "evidence": item.band.evidence,
        "tied_with_best": item.tied,
    }
