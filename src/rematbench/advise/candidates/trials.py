"""The trial of a candidate at a layout: plan, lower, count bytes, and time the step if it fits."""

from math import inf

from msgspec import Struct
from msgspec.structs import replace

from rematbench.evaluate.evaluation import host_node_bytes
from rematbench.evaluate.evaluator import Evaluator, Lowered, same_plan, timed, weighed
from rematbench.evaluate.result import PlannedJob, Result
from rematbench.evaluate.verdict import judge, judged
from rematbench.inputs.layout import LayoutError
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import IDENTITY, MethodError, Registry
from rematbench.problem import Problem
from rematbench.worlds.packages.flags import Engines

NO_PLAN = "no plan: "
RESERVED = "device memory too small for what the allocator reserves"
"""The reason for a plan whose live bytes fit but whose reserved bytes do not."""
KEPT_ACTIONS = 20_000
"""The largest program that is kept for searches on other clusters, in written-out actions."""


class Trial(Struct, frozen=True, kw_only=True):
    """The result of a candidate, with values that a running search needs. A plan that does not fit
    has no evaluation. `content`: the key of the plan (empty without a plan). `candidate`: a text
    that is equal for plans that differ only in a share or in pieces. `short_bytes`: device bytes
    that the plan lacks (with `at_least` a lower bound, because the allocator's replay was stopped
    early)."""

    result: Result
    content: bytes = b""
    candidate: str = ""
    short_bytes: float = inf
    at_least: bool = False

    @property
    def host_short_bytes(self) -> int:
        """Host bytes per node that the plan lacks; 0 or negative if it lacks none."""
        verdict = self.result.verdict
        return -verdict.host_headroom_bytes if verdict else 0


class LayoutTrials:
    """The trials of plans at one layout, which all searches share. `job`: the layout's problem and
    the plan that methods start from; `states`: the method that places optimizer states (empty:
    none); `evaluator`: keeps lowered plans for searches on other clusters (None: no such search
    follows); `trials`: by the content of their plans; `ended`: plans whose allocator replay was
    stopped early."""

    def __init__(
        self, job: PlannedJob, states: str = "", evaluator: Evaluator | None = None
    ) -> None:
        self.job, self.problem, self._states = job, job.problem, states
        self._evaluator = evaluator
        self.trials: dict[bytes, Trial] = {}
        self.ended: dict[bytes, Lowered] = {}

    def named(self, method: str) -> str:
        """A method's text, followed by the method that places the layout's states."""
        states = self._states
        if not states or f"+{method}".endswith(f"+{states}"):
            return method
        return states if method == IDENTITY else f"{method}+{states}"

    def trial(
        self,
        method: str,
        registry: Registry,
        *,
        bound_s: float = 0.0,
        engines: Engines | None = None,
    ) -> Trial:
        """Plan and lower a candidate, count its bytes, and time its step if the bytes fit.  The
        problem's reserve must stay free, and one of `engines` must support the plan.  A plan that
        equals an earlier one is not lowered again."""
        method = self.named(method)
        blank = Result(job=self.job, method=method, family="", status="failed", bound_s=bound_s)
        plan = planned_at(self.job, method, registry)
        if isinstance(plan, str):
            return Trial(result=replace(blank, reason=plan))
        content, result = same_plan(plan), replace(blank, plan=plan)
        if before := self.trials.get(content):
            again = replace(before.result, method=method, plan=plan, bound_s=bound_s)
            return replace(before, result=again)
        if engines and not engines.of(plan):
            reason = f"{engines.only} has no options for this plan"
            return Trial(result=replace(result, status="unsupported", reason=reason))
        keeps = self._evaluator
        try:
            lowered = keeps.lowered(self.problem, plan) if keeps else Lowered(self.problem, plan)
            trial = self.trials[content] = _judged(Trial(result=result, content=content), lowered)
        except (PlanError, LayoutError) as error:
            return Trial(result=replace(result, reason=f"{NO_PLAN}{error}"))
        if trial.at_least:
            self.ended[content] = lowered
        # The program is needed again only to time it on another cluster or to replay it in full.
        lowered.forget(KEPT_ACTIONS if keeps else 0)
        return trial

    def lacked_bytes(self, content: bytes) -> float:
        """The device bytes that a plan lacks, from a full replay of a plan whose replay was stopped
        early."""
        held = weighed(self.problem, self.ended[content])
        return float(held.nbytes - _room(self.problem))


def _room(problem: Problem) -> int:
    return problem.usable_bytes - problem.reserve_bytes


def planned_at(job: PlannedJob, method: str, registry: Registry) -> Plan | str:
    """A candidate's plan, or the reason why it has no plan."""
    try:
        plan = registry.resolve(method, None, job.problem).plan(job.problem, job.base)
    except (PlanError, LayoutError, MethodError) as error:
        return f"{NO_PLAN}{error}"
    return f"{NO_PLAN}{plan.reason}" if isinstance(plan, Unsupported) else plan


def _judged(trial: Trial, lowered: Lowered) -> Trial:
    """`trial` completed by the plan's evaluation if it fits, otherwise by the reason.  Cheap checks
    run first: live bytes, host bytes, the allocator's replay, the simulation of the step."""
    result, problem = trial.result, trial.result.problem
    room, pinned = _room(problem), host_node_bytes(problem, lowered.ranks)
    live = judged(problem, lowered.ranks, lowered.live_bytes, pinned)
    if live.host_headroom_bytes < 0 and lowered.live_bytes <= room:
        short = replace(result, status="oom", reason=live.binds, verdict=live)
        return replace(trial, result=short)
    held = weighed(problem, lowered, room, enough_bytes=room)
    if held.nbytes > room:
        reason = RESERVED if lowered.live_bytes <= room else "device memory"
        short = replace(result, status="oom", reason=reason)
        lacked = float(held.nbytes - room)
        return replace(trial, result=short, short_bytes=lacked, at_least=held.at_least)
    evaluation = timed(problem, lowered, held)
    verdict = judge(problem, evaluation)
    if not verdict.fits:
        short = replace(result, status="oom", reason=verdict.binds, verdict=verdict)
        return replace(trial, result=short)
    if evaluation.not_timed:
        reason = evaluation.not_timed
        untimed = replace(result, status="unsupported", reason=reason, verdict=verdict)
        return replace(trial, result=untimed)
    fits = replace(result, status="ok", evaluation=evaluation, verdict=verdict)
    return replace(trial, result=fits)
