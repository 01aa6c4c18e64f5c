"""The table of layer grain: karma, which swaps and rebuilds whole layers, beside memo, which swaps
rows of every layer, at memo's peak or at the least peak above it that whole layers reach."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rematbench.evaluate.evaluation import evaluate
from rematbench.paper.sheet.table import Column, Table, columns, fixed, gib, seconds, signed_percent
from rematbench.plan import Offload, Plan, Unsupported
from rematbench.plugins.discover import discover
from rematbench.problem import Problem
from rematbench.solve.search import smallest_feasible
from rematbench.worlds.records.suite import load_suite

INPUTS = {"suite": "config/traced.yaml"}
READS = ("methods/karma.py", "methods/memo.py")


def build(suite: Path) -> Table:
    """The table of the suite's problems."""
    rows = [row for spec in load_suite(suite).problems for row in _rows(spec.name, spec.problem())]
    return Table(
        name="layer_grain",
        title="Layer grain: karma at memo's peak, or at its least peak",
        columns=(
            *columns("problem method peak_device_bytes"),
            Column("host_bytes", "pinned GiB/node", gib),
            Column("alpha", "memo's share", fixed(2)),
            Column("swapped", "layers swapped"),
            Column("step_s", "step", seconds),
            Column("more", "peak over memo %", signed_percent),
            Column("slower", "step over memo %", signed_percent),
            *columns("reason"),
        ),
        rows=tuple(rows),
        note="World: simulated. karma has the most resident layers of each chunk with which its "
        "peak is no more than memo's, or none where whole layers do not reach that peak. memo "
        "splits a layer's tokens, so its share fits the copies exactly.",
    )


def _rows(name: str, problem: Problem) -> Iterator[dict[str, Any]]:
    memo = discover().resolve("memo").plan(problem)
    if isinstance(memo, Unsupported):
        yield {"problem": name, "method": "memo", "reason": memo.reason}
        return
    first = _row(problem, name, "memo", memo) | {"alpha": float(memo.fit["alpha"])}
    yield first
    karma = _at_peak(problem, first["peak_device_bytes"])
    if isinstance(karma, Unsupported):
        yield {"problem": name, "method": "karma", "reason": karma.reason}
        return
    row = _row(problem, name, "karma", karma)
    moved = [r.select.layers or () for r in karma.rules if isinstance(r.fate, Offload)]
    layers = problem.workload.model.num_layers
    row["swapped"] = f"{sum(map(len, moved))} of {layers}"
    keys = {"more": "peak_device_bytes", "slower": "step_s"}
    yield row | {name: row[key] / first[key] - 1 for name, key in keys.items()}


def _at_peak(problem: Problem, peak_bytes: int) -> Plan | Unsupported:
    """karma's plan with the most resident layers whose peak is at most `peak_bytes`, or with no
    resident layer."""
    longest = max(len(chunk) for rank in problem.base_plan.partition for chunk in rank)

    def at(leaving: int) -> Plan | Unsupported:
        return discover().resolve("karma", {"resident": longest - leaving}).plan(problem)

    def margin(leaving: int) -> int:
        plan = at(leaving)
        return peak_bytes - problem.cost.peak_bytes(plan) if isinstance(plan, Plan) else 0

    leaving = smallest_feasible(margin, longest)
    return at(longest if leaving is None else leaving)


def _row(problem: Problem, name: str, method: str, plan: Plan) -> dict[str, Any]:
    found = evaluate(problem, plan)
    return {
        "problem": name,
        "method": method,
        "peak_device_bytes": max(found.peak_device_bytes),
        "host_bytes": found.host_node_bytes,
        "step_s": found.step_s,
    }
