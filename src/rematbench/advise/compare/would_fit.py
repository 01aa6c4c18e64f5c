"""Where no entry fits: the smallest changes with which one would, each checked by simulation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace as replaced

from msgspec.structs import replace

from rematbench.advise.compare.entry import Entry
from rematbench.evaluate.result import Result, evaluate_plan
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import MethodError, Registry
from rematbench.problem import Problem
from rematbench.solve.search import smallest_feasible
from rematbench.spec.cluster import Cluster
from rematbench.spec.layout import Layout, LayoutError

NEAREST = 4
"""How many entries, nearest to fitting first, are tried on twice the GPUs."""

MIB = 2**20
GIB = 2**30

STEP_BYTES = 32 * MIB
"""Resolution of the sufficient bytes: a few hundredths of a GiB."""


def would_fit(problem: Problem, entries: Sequence[Entry], registry: Registry) -> list[str]:
    """The changes with which some entry would fit, one line of words each; empty where none helps.
    Tried are more bytes where they are short, optimizer states on the host, and twice the GPUs."""
    near = sorted((e for e in entries if e.status == "oom" and e.plan), key=_missing_bytes)
    found: list[str] = []
    for way in (_more_bytes, _states_on_host):
        found += next(((line,) for entry in near if (line := way(problem, entry))), ())
    return found + _twice_the_gpus(problem, near[:NEAREST], registry)


def _missing_bytes(entry: Entry) -> int:
    """Missing bytes of a device and of a host together."""
    assert entry.verdict is not None
    room = entry.verdict
    return max(0, -room.headroom_bytes) + max(0, -room.host_headroom_bytes)


def _more_bytes(problem: Problem, entry: Entry) -> str:
    """More device and host bytes with which the entry fits, in steps of STEP_BYTES; or empty."""
    assert entry.plan is not None
    assert entry.verdict is not None
    plan, cluster = entry.plan, problem.cluster
    short = max(0, -entry.verdict.host_headroom_bytes) / (
        1.0 - problem.cost.common.host_system_share
    )
    host = int(-(-short // STEP_BYTES)) * STEP_BYTES
    most = -(-max(0, -entry.verdict.headroom_bytes) // STEP_BYTES)

    def larger(steps: int) -> Problem:
        hbm_bytes = cluster.hbm_bytes + steps * STEP_BYTES
        host_bytes = cluster.host_bytes + host
        return _on(problem, replace(cluster, hbm_bytes=hbm_bytes, host_bytes=host_bytes))

    steps = smallest_feasible(lambda n: larger(n).cost.headroom_bytes(plan), most) if most else 0
    if steps is None or not _fits(larger(steps), plan):
        return ""
    more = [f"{steps * STEP_BYTES / GIB:.2f} GiB more on each device"] if steps else []
    more += [f"{host / GIB:.2f} GiB more host memory on each node"] if host else []
    return f"with {' and '.join(more)} ({entry.name})"


def _states_on_host(problem: Problem, entry: Entry) -> str:
    """Optimizer states in host memory, with a speed where the update rate is known; or empty."""
    assert entry.plan is not None
    fate = entry.plan.state("optimizer")
    if fate.home == "host" or fate.update != "step":
        return ""
    others = tuple(state for state in entry.plan.states if state.kind != "optimizer")
    plan = replace(entry.plan, states=(*others, replace(fate, home="host")))
    outcome = _run(problem, plan)
    found = outcome.evaluation if outcome else None
    if found is None or outcome is None or not (outcome.verdict and outcome.verdict.fits):
        return ""
    speed = f"{found.tokens_per_s_per_gpu:.4g} tokens/s/GPU"
    return (
        f"with the optimizer's states in host memory ({entry.name}; "
        f"{found.host_node_bytes / GIB:.0f} GiB of each node's; {found.not_timed or speed})"
    )


def _twice_the_gpus(problem: Problem, near: Sequence[Entry], registry: Registry) -> list[str]:
    """The fastest entry and layout on twice the GPUs, with one parallel degree doubled."""
    best: tuple[float, str] | None = None
    for layout in _doubled(problem.layout):
        try:
            larger = _at(problem, layout)
        except LayoutError:
            continue
        for entry in near:
            outcome = _again(larger, entry, registry)
            if outcome is None or outcome.status != "ok" or outcome.evaluation is None:
                continue
            rate = outcome.evaluation.tokens_per_s_per_gpu
            text = (
                f"on {layout.gpus} GPUs at tp {layout.tp} cp {layout.cp} pp {layout.pp} dp "
                f"{layout.dp} ({entry.name}, {rate:.4g} tokens/s/GPU)"
            )
            best = max(best or (rate, text), (rate, text))
    return [best[1]] if best else []


def _doubled(layout: Layout) -> Iterator[Layout]:
    for degree in ("tp", "cp", "pp", "dp"):
        changes = {degree: 2 * getattr(layout, degree)}
        if degree == "tp":
            changes["sp"] = layout.sp or layout.tp == 1
        yield replace(layout, **changes)


def _at(problem: Problem, layout: Layout) -> Problem:
    return replaced(problem, layout=layout, reserve_bytes=0, _memo={}, _weights={})


def _on(problem: Problem, cluster: Cluster) -> Problem:
    return replaced(problem, cluster=cluster, reserve_bytes=0, _memo={}, _weights={})


def _again(problem: Problem, entry: Entry, registry: Registry) -> Result | None:
    """The outcome of an entry's methods and settings on another problem; None without a plan."""
    try:
        plan = registry.resolve(entry.name, None, problem).plan(problem)
    except (MethodError, PlanError, LayoutError):
        return None
    return None if isinstance(plan, Unsupported) else _run(problem, plan)


def _fits(problem: Problem, plan: Plan) -> bool:
    outcome = _run(problem, plan)
    return outcome is not None and outcome.status == "ok"


def _run(problem: Problem, plan: Plan) -> Result | None:
    try:
        return evaluate_plan(problem, plan)
    except (PlanError, LayoutError):
        return None
