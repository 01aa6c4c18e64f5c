"""The smallest changes with which some plan would fit, each checked by simulation."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from rematbench.evaluate.result import Result, evaluate_plan
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.system import with_facts
from rematbench.plan import Plan, PlanError, Unsupported, state_fates
from rematbench.plugins.registry import MethodError, Registry
from rematbench.problem import Problem
from rematbench.solve.search import smallest_feasible

NEAREST = 4
"""The number of results, nearest to fitting first, that are tried on twice the GPUs."""
SHORT = ("fragmented", "dropping", "oom")
"""Statuses of plans that need more memory than there is."""
MIB = 2**20
GIB = 2**30
STEP_BYTES = 32 * MIB
"""The resolution of the answer in bytes."""


def would_fit(problem: Problem, results: Sequence[Result], registry: Registry) -> list[str]:
    """Changes with which some method would fit, a line each: more of the bytes that are short,
    optimizer states on the host, or twice the GPUs; empty if none helps."""
    near = sorted(
        (item for item in results if item.status in SHORT and item.plan), key=_missing_bytes
    )
    lines: list[str] = []
    for change in (_more_bytes, _states_on_host):
        lines += next(((line,) for result in near if (line := change(problem, result))), ())
    return lines + _twice_the_gpus(problem, near[:NEAREST], registry)


def _missing_bytes(result: Result) -> int:
    """The device bytes and host bytes that a plan lacks, added up."""
    assert result.verdict is not None
    verdict = result.verdict
    return max(0, -verdict.headroom_bytes) + max(0, -verdict.host_headroom_bytes)


def _more_bytes(problem: Problem, result: Result) -> str:
    """The further device and host bytes with which the plan fits, in words; empty if none do."""
    assert result.plan is not None
    assert result.verdict is not None
    plan, cluster = result.plan, problem.cluster
    short = max(0, -result.verdict.host_headroom_bytes) / (
        1.0 - problem.cost.common.host_system_share
    )
    host = int(-(-short // STEP_BYTES)) * STEP_BYTES
    most = -(-max(0, -result.verdict.headroom_bytes) // STEP_BYTES)

    def larger(steps: int) -> Problem:
        hbm_bytes = cluster.hbm_bytes + steps * STEP_BYTES
        more = replace(cluster, hbm_bytes=hbm_bytes, host_bytes=cluster.host_bytes + host)
        return problem.remade(cluster=more, reserve_bytes=0)

    steps = smallest_feasible(lambda n: larger(n).cost.headroom_bytes(plan), most) if most else 0
    if steps is None or not _fits(larger(steps), plan):
        return ""
    more = [f"{steps * STEP_BYTES / GIB:.2f} GiB more memory on each device"] if steps else []
    more += [f"{host / GIB:.2f} GiB more host memory on each node"] if host else []
    return f"with {' and '.join(more)} ({result.method})"


def _states_on_host(problem: Problem, result: Result) -> str:
    """How the plan fits with optimizer states in host memory, in words; empty if it does not."""
    assert result.plan is not None
    fate = result.plan.state("optimizer")
    if fate.home == "host" or fate.update != "step":
        return ""
    there = with_facts(problem.system, optimizer_on_host=True)
    homes = {state.kind: state.home for state in state_fates(problem.layout, there)}
    states = (replace(state, home=homes[state.kind]) for state in result.plan.states)
    plan = replace(result.plan, states=tuple(states))
    hosted = _run(problem.remade(system=there), plan)
    evaluation, verdict = (hosted.evaluation, hosted.verdict) if hosted else (None, None)
    if evaluation is None or verdict is None or not verdict.fits:
        return ""
    speed = f"{evaluation.tokens_per_s_per_gpu:.4g} tokens/s/GPU"
    return (
        f"with the optimizer's states in host memory ({result.method}; "
        f"{evaluation.host_node_bytes / GIB:.0f} GiB of host memory per node; "
        f"{evaluation.not_timed or speed})"
    )


def _twice_the_gpus(problem: Problem, near: Sequence[Result], registry: Registry) -> list[str]:
    """The fastest method and layout that fit on twice the GPUs, with one parallel degree doubled
    (the one with most free bytes if time is not modelled), in words; empty if none fits."""
    best: tuple[float, str] | None = None
    for layout in _doubled(problem.layout):
        try:
            larger = problem.remade(layout=layout, reserve_bytes=0)
        except LayoutError:
            continue
        for result in near:
            again = _again(larger, result, registry)
            if again is None or not again.fits:
                continue
            rate, free = again.tokens_per_s_per_gpu, again.headroom_bytes or 0
            value = f"{free / GIB:.2f} GiB left" if rate is None else f"{rate:.4g} tokens/s/GPU"
            text = (
                f"on {layout.gpus} GPUs at tp {layout.tp} cp {layout.cp} pp {layout.pp} dp "
                f"{layout.dp} ({result.method}, {value})"
            )
            amount = float(free) if rate is None else rate
            best = max(best or (amount, text), (amount, text))
    return [best[1]] if best else []


def _doubled(layout: Layout) -> Iterator[Layout]:
    for degree in ("tp", "cp", "pp", "dp"):
        changes = {degree: 2 * getattr(layout, degree)}
        if degree == "tp":
            changes["sp"] = layout.sp or layout.tp == 1
        yield replace(layout, **changes)


def _again(problem: Problem, result: Result, registry: Registry) -> Result | None:
    """A result's methods and settings evaluated on another problem; None without a plan."""
    try:
        plan = registry.resolve(result.method, None, problem).plan(problem)
    except (MethodError, PlanError, LayoutError, RateError):
        return None
    return None if isinstance(plan, Unsupported) else _run(problem, plan)


def _fits(problem: Problem, plan: Plan) -> bool:
    result = _run(problem, plan)
    return result is not None and result.fits


def _run(problem: Problem, plan: Plan) -> Result | None:
    try:
        return evaluate_plan(problem, plan)
    except (PlanError, LayoutError):
        return None
