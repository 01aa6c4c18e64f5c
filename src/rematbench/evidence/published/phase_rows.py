"""Published and predicted seconds of the phases of training steps with states in host memory
(results/published/offloaded_states.csv): forward, backward, update and the whole step."""

from functools import cache
from typing import Any, NamedTuple

from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evidence.published.host_rows import host_rows
from rematbench.evidence.published.sheets import Cell
from rematbench.evidence.published.update_rows import (
    at_rate,
    fitted_rates,
    kind_of,
    plan_of,
    update_rows,
)
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from rematbench.problem import Problem


class Phases(NamedTuple):
    """Seconds of all forwards and of all backwards of a step, and of the step."""

    forward_s: float
    backward_s: float
    step_s: float

    @property
    def update_s(self) -> float:
        """Seconds of the step after its last backward."""
        return self.step_s - self.forward_s - self.backward_s


def phases(problem: Problem, plan: Plan) -> Phases:
    """The simulated phases of a plan without a pipeline.  A phase ends where compute ends the last
    of its actions, so what a phase waits for counts as a part of it."""
    program = lower(plan, problem)
    simulation = simulate(program, action_seconds(problem, program), record=True)
    ends: dict[tuple[str, int], float] = {}
    for one in simulation.intervals:
        if one.stream == "compute":
            pass_ = (one.block, one.micro_batch)
            ends[pass_] = max(ends.get(pass_, 0.0), one.end_s)
    seconds, before = {"F": 0.0, "B": 0.0}, 0.0
    for (block, _), end in ends.items():
        if block in seconds:
            seconds[block] += end - before
        before = end
    return Phases(seconds["F"], seconds["B"], simulation.step_s)


@cache
def phase_rows() -> tuple[dict[str, Any], ...]:
    """The rows of `update_rows` with `pred_forward_s`, `pred_backward_s` and `pred_step_s`: every
    layer is rebuilt, as in the logs, and gradients leave beside the backward."""
    rates = fitted_rates()
    return tuple({**row, **_predicted(row, rates[kind_of(row)])} for row in update_rows())


def whole_plan(row: Cell, problem: Problem) -> Plan:
    """The plan of a row's whole step."""
    full = discover().resolve("full_recompute").plan(problem)
    assert isinstance(full, Plan)
    return replace(full, states=plan_of(row, problem)[0].states)


def _predicted(row: dict[str, Any], rate: float) -> dict[str, float]:
    problem = at_rate(row, rate)
    seconds = phases(problem, whole_plan(row, problem))
    return {f"pred_{name}": value for name, value in seconds._asdict().items()}


def hosted_rows() -> list[dict[str, Any]]:
    """The rows of `update_rows`, those of DeepSpeed itself with the columns of `host_rows`."""
    rows = update_rows()
    own = [row for row in rows if row["variant"] != "dos"]
    merged = [{**row, **more} for row, more in zip(own, host_rows(), strict=True)]
    return [*merged, *(row for row in rows if row["variant"] == "dos")]
