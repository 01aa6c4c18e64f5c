"""The trial of one candidate: plan, lower, count bytes, and time the step where the bytes fit."""

from msgspec import Struct
from msgspec.structs import replace

from rematbench.advise.search.space import Choice
from rematbench.evaluate.evaluation import PlanEvaluation, host_node_bytes
from rematbench.evaluate.evaluator import Evaluator, Lowered, same_plan, timed, weighed
from rematbench.evaluate.verdict import Verdict, judge, judged
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import MethodError, Registry
from rematbench.problem import Problem
from rematbench.spec.layout import LayoutError
from rematbench.worlds.packages.flags import Engines

NO_PLAN = "no plan: "
RESERVED = "device memory, as the allocator reserves it"
"""Why a plan does not fit whose live bytes fit."""

KEPT_ACTIONS = 20_000
"""The largest program, in actions that are written out, that is kept for other clusters."""


class Tried(Struct, frozen=True, kw_only=True):
    """One candidate after its trial.  `content`: what its plan is known by; empty without a plan.
    `arm`: what all plans have in common that differ in a share or in pieces alone.
    Without an evaluation, `reason` says why: the plan does not fit (it lacks `short_bytes` of a
    device's memory; `at_least`: or more), or the method has no plan."""

    choice: Choice
    method: str
    bound_s: float
    content: bytes = b""
    arm: str = ""
    reason: str = ""
    short_bytes: float = float("inf")
    at_least: bool = False
    evaluation: PlanEvaluation | None = None
    verdict: Verdict | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the step; infinite where the plan does not fit."""
        return self.evaluation.step_s if self.evaluation else float("inf")


class Trials(Struct):
    """The trials of a layout, by the content of their plans; `programs`: lowered plans that are
    kept for other clusters; `ended`: plans whose replay of the allocator ended early."""

    programs: Evaluator | None = None
    tried: dict[bytes, Tried] = {}
    ended: dict[bytes, Lowered] = {}


def tried_plan(
    choice: Choice,
    problem: Problem,
    method: str,
    bound_s: float,
    registry: Registry,
    engines: Engines | None = None,
    known: Trials | None = None,
) -> Tried:
    """Plan and lower a candidate and count its bytes; time its step if the bytes fit.  The reserve
    of the problem stays free, and one of `engines` has to have options for the plan.  `known`:
    earlier trials at the layout, to which the new one is added; an equal plan is not lowered
    again."""
    tried = Tried(choice=choice, method=method, bound_s=bound_s)
    plan = planned_at(choice, problem, method, registry)
    if isinstance(plan, str):
        return replace(tried, reason=plan)
    known, tried = known or Trials(), replace(tried, content=same_plan(plan))
    if found := known.tried.get(tried.content):
        return replace(found, method=method, bound_s=bound_s)
    if engines and not engines.of(plan):
        return replace(tried, content=b"", reason=f"no options of {engines.only}")
    try:
        shared = known.programs
        lowered = shared.lowered(problem, plan) if shared else Lowered(problem, plan)
        found = known.tried[tried.content] = _judged(tried, problem, lowered)
    except (PlanError, LayoutError) as error:
        return replace(tried, content=b"", reason=f"{NO_PLAN}{error}")
    if found.at_least:
        known.ended[tried.content] = lowered
    # it is timed on another cluster, or replayed whole, if at all
    lowered.forget(KEPT_ACTIONS if shared else 0)
    return found


def lacked_bytes(problem: Problem, lowered: Lowered) -> float:
    """The device bytes that a plan lacks whose replay of the allocator ended early."""
    return float(weighed(problem, lowered).nbytes - _room(problem))


def _room(problem: Problem) -> int:
    return problem.usable_bytes - problem.reserve_bytes


def planned_at(choice: Choice, problem: Problem, method: str, registry: Registry) -> Plan | str:
    """A candidate's plan, or the reason why it has no plan."""
    try:
        base = choice.base(problem.base_plan)
        plan = registry.resolve(method, None, problem).plan(problem, base)
    except (PlanError, LayoutError, MethodError) as error:
        return f"{NO_PLAN}{error}"
    return f"{NO_PLAN}{plan.reason}" if isinstance(plan, Unsupported) else plan


def _judged(tried: Tried, problem: Problem, lowered: Lowered) -> Tried:
    """`tried` with the plan's evaluation where the plan fits, else with the reason.  What takes the
    least time is done first: live bytes, host bytes, the allocator, the step's seconds."""
    room = _room(problem)
    pinned = host_node_bytes(problem, lowered.ranks)
    live = judged(problem, lowered.ranks, lowered.live_bytes, pinned)
    if live.host_headroom_bytes < 0 and lowered.live_bytes <= room:
        return replace(tried, reason=live.binds, verdict=live)
    held = weighed(problem, lowered, room, enough_bytes=room)
    if held.nbytes > room:
        reason = RESERVED if lowered.live_bytes <= room else "device memory"
        short_bytes = float(held.nbytes - room)
        return replace(tried, reason=reason, short_bytes=short_bytes, at_least=held.at_least)
    found = timed(problem, lowered, held)
    verdict = judge(problem, found)
    if not verdict.fits or found.not_timed:
        reason = found.not_timed if verdict.fits else verdict.binds
        return replace(tried, reason=reason, verdict=verdict)
    return replace(tried, evaluation=found, verdict=verdict)
