"""The facts of a stack that affect a job: other values would change its bytes or seconds."""

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from msgspec.json import encode
from msgspec.structs import replace

from rematbench.evaluate.evaluator import SINGLE_EVALUATOR, evaluate
from rematbench.host.declared import facts as declared
from rematbench.host.declared import flat
from rematbench.inputs.configfile import ConfigError, convert
from rematbench.inputs.facts import check_system, contradictions
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.system import Graphs, Parameters, System, with_facts
from rematbench.plan import Plan, PlanError
from rematbench.problem import Problem

NUMBERS = (0, 1, 4, 1024)
"""Values to try for a fact that is a number, if its range allows them.  1024 is the most bytes that
a parameter's states may have, and does not divide usual vocabularies."""
COUNTS = (0, 10**6, 10**9)
"""Values to try for a fact that is a number of parameters.  1 is left out, because sub-groups of
one parameter would give a step as many updates as the model has parameters."""
GRAPHED = ("none", "layer")
"""Values to try for what CUDA graphs capture."""


def acting(problem: Problem, plan: Plan, facts: Iterable[str]) -> list[str]:
    """Those of `facts` (named as in a stack's file) for which another value would change the bytes
    or seconds of a plan; none if the plan cannot be lowered."""
    try:
        here = [*_numbers(problem, plan)]
    except PlanError:
        return []
    usual = plan.states == problem.base_plan.states

    def changes(system: System) -> bool:
        try:
            other = problem.remade(system=system)
            there = replace(plan, states=other.base_plan.states) if usual else plan
            return any(a != b for a, b in zip(here, _numbers(other, there), strict=True))
        except (LayoutError, RateError, PlanError):
            return False  # A stack with this value cannot run the job.

    return [fact for fact in facts if any(map(changes, _others(problem.system, fact)))]


def _numbers(problem: Problem, plan: Plan) -> Iterator[bytes]:
    """Yield the numbers of a plan as JSON, in which unknown times are equal: first the bytes, which
    need no simulation."""
    yield encode(SINGLE_EVALUATOR.lowered(problem, plan).ranks)
    found = evaluate(problem, plan)
    yield encode((found.step_s, found.reserved_bytes, found.host_node_bytes))


def _others(system: System, fact: str) -> Iterator[System]:
    """The stack with each other value that the fact may have.  Facts that contradict the value
    (such as where a fused loss writes its gradient) get their defaults."""
    values = flat(system)
    for value in _values(fact, values[fact]):
        try:
            changed = convert({**values, fact: value}, System, "")
            dependent = {key for key, _ in contradictions(changed)} - {fact}
            usual = {key: declared(System)[key].default for key in dependent}
            changed = with_facts(changed, **usual)
            check_system(changed, "")
        except ConfigError:
            continue
        yield changed


def _values(fact: str, value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [value[::-1]]
    kind = declared(System)[fact].type
    if isinstance(value, str):
        tried = GRAPHED if kind == Graphs else get_args(kind)
    elif isinstance(value, bool):
        tried = (False, True)
    else:
        tried = COUNTS if kind == Parameters else NUMBERS
    return [other for other in tried if other != value]
