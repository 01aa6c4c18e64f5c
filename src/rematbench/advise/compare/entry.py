"""The outcome of one candidate, and the comparison that collects them."""

from typing import Any, Literal

from msgspec import Struct

from rematbench.advise.compare.candidates import TUNED, Candidate, Made, changed_kinds
from rematbench.evaluate.evaluation import PlanEvaluation
from rematbench.evaluate.verdict import Retries, Verdict
from rematbench.host.workers import NoAnswer
from rematbench.plan import Plan

Status = Literal["ok", "oom", "unsupported", "failed", "timed out"]

UNPLANNED = 2**62
"""Bytes of an entry without a plan: more than any device has."""


class Entry(Struct, frozen=True, kw_only=True):
    """The outcome of one candidate.

    `parts_s` are the step's seconds by breakdown.PARTS and `retries` the allocator's, both where
    the entry fits (variants have neither). `same_as` names an earlier entry with an equal plan;
    `clash` names the decisions in which the plan overrules the base that it was made on.
    """

    candidate: Candidate
    status: Status
    reason: str = ""
    settings: dict[str, Any] = {}
    plan: Plan | None = None
    evaluation: PlanEvaluation | None = None
    verdict: Verdict | None = None
    parts_s: dict[str, float] = {}
    retries: Retries | None = None
    same_as: str = ""
    clash: str = ""

    @property
    def name(self) -> str:
        """The candidate's name, with the value of its tuned setting."""
        key = self.candidate.smallest
        tuned = f" {self.settings[key]}" if key in self.settings else ""
        return f"{self.candidate.name}{tuned}"

    @property
    def step_s(self) -> float:
        """Seconds of the step, also where the plan does not fit; infinite without a plan."""
        return self.evaluation.step_s if self.evaluation else float("inf")

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the fullest device reserves; without a plan, more than any device has."""
        return self.evaluation.reserved_bytes if self.evaluation else UNPLANNED

    @property
    def gpu_hours_per_1e9_tokens(self) -> float | None:
        """GPU-hours to train on 1e9 tokens; None without a speed."""
        rate = self.evaluation.tokens_per_s_per_gpu if self.evaluation else None
        return 1e9 / rate / 3600 if rate else None


class Compared(Struct, frozen=True, kw_only=True):
    """All entries, best first. `repeated`: how many compositions and policies were left out because
    their plan equals another. `unavailable`: files of methods that could not be read, with the
    reason."""

    entries: tuple[Entry, ...]
    repeated: int
    unavailable: dict[str, str]


def lost_reason(why: NoAnswer, limit_s: int) -> str:
    """Why a worker gave no answer about a candidate, which had `limit_s` CPU seconds."""
    if why == "died":
        return "its process died"
    return f"not planned within {limit_s} CPU seconds (--limit SECONDS allows more)"


def as_made(base: Plan, entry: Entry) -> Made:
    """An entry with a plan in the form that `compositions` takes."""
    assert entry.plan is not None
    return Made(
        candidate=entry.candidate,
        plan=entry.plan,
        kinds=changed_kinds(base, entry.plan),
        tuned=entry.plan.fit.get("bound") == TUNED,
    )
