"""Entries with what is known of their errors, and every number of one as a line of a table."""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from rematbench.choose.candidates import CompareConfig
from rematbench.choose.entry import Comparison, Entry
from rematbench.choose.job import Job
from rematbench.packages.flags import Engines
from rematbench.problem import Problem
from rematbench.published.evidence import RULES, Evidence, Known, evidence
from rematbench.simulate.breakdown import PARTS
from rematbench.spec.configfile import ConfigError, wrong_field

Amount = Annotated[float, Meta(ge=0.0, le=1e30)]


class Judged(Struct, frozen=True):
    """An entry, its evidence, and whether it is within the error of the best (`tied`)."""

    entry: Entry
    evidence: Evidence
    tied: bool = False


class Order(Struct, frozen=True, kw_only=True):
    """What is to be trained (`tokens`) and what an hour of a GPU costs (`price`); zero where nobody
    said."""

    tokens: Amount = 0.0
    price: Amount = 0.0

    def __post_init__(self) -> None:
        """ConfigError for what is no such number, or a price of nothing."""
        wrong = wrong_field(self, Order)
        if wrong is not None:
            raise ConfigError("", *wrong)
        if self.price and not self.tokens:
            raise ConfigError("", "price", "has no cost without tokens")

    def days(self, entry: Entry, gpus: int) -> float | None:
        """Days on all GPUs for all tokens."""
        hours = self._gpu_hours(entry)
        return None if hours is None else hours / gpus / 24

    def cost(self, entry: Entry) -> float | None:
        """The GPU-hours of all tokens at the price of one."""
        hours = self._gpu_hours(entry)
        return None if hours is None or not self.price else hours * self.price

    def _gpu_hours(self, entry: Entry) -> float | None:
        each = entry.gpu_hours_per_1e9_tokens
        return each * self.tokens / 1e9 if each and self.tokens else None


def judge(
    found: Comparison, problem: Problem, known: Sequence[Known], config: CompareConfig
) -> list[Judged]:
    """Entries with their evidence; an equal plan has the evidence of the plan it equals."""
    family = {entry.name: entry.candidate.family for entry in found.entries}
    judged = [
        Judged(
            entry,
            evidence(
                problem,
                family.get(entry.same_as, entry.candidate.family),
                known,
                config.context_factor,
            ),
        )
        for entry in found.entries
    ]
    return tied(judged)


def tied(judged: Sequence[Judged]) -> list[Judged]:
    """Mark fitting entries whose speed is within the error of predictions of the fastest's: the
    larger error of the two counts; without any error nothing is marked."""
    best = next((item for item in judged if item.entry.status == "ok"), None)
    if best is None:
        return list(judged)
    fastest = _speed(best.entry)
    found = []
    for item in judged:
        errors = [e for e in (best.evidence.error, item.evidence.error) if e is not None]
        near = item.entry.status == "ok" and item is not best and bool(errors)
        equal = near and _speed(item.entry) >= fastest * (1 - max(errors))
        found.append(Judged(item.entry, item.evidence, equal))
    return found


def _speed(entry: Entry) -> float:
    assert entry.evaluation is not None
    return entry.evaluation.tokens_per_s_per_gpu


def lines(
    judged: Sequence[Judged], job: Job, engines: Engines, order: Order
) -> list[dict[str, Any]]:
    """Every number of every entry, and the job: a table that needs nothing beside it."""
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
    """Every number of an entry: base SI units, fractions; None where there is none.  Speeds of a
    plan that does not fit are those it would have if it did."""
    entry, found = item.entry, item.evidence
    evaluation, verdict = entry.evaluation, entry.verdict
    speeds = ("step_s", "tokens_per_s_per_gpu", "mfu_causal", "mfu_dense", "hfu")
    amounts = ("recompute_flop", "offload_bytes", "reserved_bytes", "host_node_bytes")
    rooms = ("headroom_bytes", "host_headroom_bytes", "binds")
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
        **{f"{part}_s": entry.parts_s.get(part) for part in PARTS},
        "plan": "; ".join(f"{k}={v}" for k, v in (entry.plan.fit if entry.plan else {}).items()),
        "evidence": found.grade or "none",
        "evidence_rule": RULES[found.rule - 1] if found.rule else "",
        "evidence_cells": found.cells,
        "evidence_error": found.error,
        "evidence_groups": "; ".join(found.groups),
        "tied_with_best": item.tied,
    }
