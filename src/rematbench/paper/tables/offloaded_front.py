"""Seconds of an update against device bytes with optimizer states in host memory: published runs,
the same runs predicted, and the front of optimizer_offload on the nodes of the logs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rematbench.evaluate.evaluation import evaluate
from rematbench.evidence.hosted import hosted_cases, phases, placed_states, timed
from rematbench.evidence.published.row_cases import PublishedCase
from rematbench.evidence.published.sheets import Cell
from rematbench.paper.sheet.table import Table, table_of
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from rematbench.problem import Problem

INPUTS = {"sheet": "results/published/offloaded_states.csv"}
READS = (
    "config/clusters",
    "config/calibration.yaml",
    "methods/full_recompute.py",
    "methods/optimizer_offload.py",
)
NODES = ("h100-80gb-dos", "polaris-a100-40gb-bound")
MODELS = ("7B", "20B")
NAMES = {"deepspeed_async": "DeepSpeed, asynchronous copies", "dos": "Deep Optimizer States"}
FRONT = "optimizer_offload"
STEPS = 10


def build(sheet: Path) -> Table:
    """The published rows of MODELS on NODES, followed by optimizer_offload on the same jobs."""
    del sheet  # hosted_cases() reads the file
    rows = [
        (row, case)
        for row, case in hosted_cases()
        if row["cluster"] in NODES and row["model"] in MODELS
    ]
    lines = [line for row, case in rows if row["variant"] in NAMES for line in _both(row, case)]
    first = {(row["cluster"], row["model"]): (row, case) for row, case in rows}
    lines += [line for row, case in first.values() for line in _front(row, case)]
    return table_of("offloaded_front", lines)


def _of(row: Cell, series: str, world: str) -> dict[str, Any]:
    keys = ("cluster", "model", "parameters")
    return {**{key: row[key] for key in keys}, "series": series, "world": world}


def _both(row: Cell, case: PublishedCase) -> Iterator[dict[str, Any]]:
    name, every = NAMES[row["variant"]], int(row["update_interleave"] or 0)
    share = {"share": float(row["host_ratio"]), "visiting": 1 / every if every else 0.0}
    published = {"peak_device_bytes": float(row["peak_device_bytes"])}
    published["update_s"] = float(row["update_s"])
    yield _of(row, name, "published") | share | published
    problem = timed(case).problem()
    plan = discover().resolve("full_recompute").plan(problem, placed_states(case, problem)[0])
    assert isinstance(plan, Plan)
    yield _of(row, name, "simulated") | share | _numbers(problem, plan)


def _front(row: Cell, case: PublishedCase) -> Iterator[dict[str, Any]]:
    """optimizer_offload on the job of a row, at every share of states off the device that fits."""
    problem = timed(case).problem()
    for step in range(STEPS + 1):
        settings = {"optimizer_offload.share": step / STEPS}
        plan = discover().resolve("full_recompute+optimizer_offload", settings).plan(problem)
        assert isinstance(plan, Plan)
        share = {"share": step / STEPS, "visiting": plan.fit["visiting"]}
        numbers = _numbers(problem, plan)
        if numbers["peak_device_bytes"] <= problem.usable_bytes:
            yield _of(row, FRONT, "simulated") | share | numbers


def _numbers(problem: Problem, plan: Plan) -> dict[str, Any]:
    peak_bytes = max(evaluate(problem, plan).peak_device_bytes)
    return {"peak_device_bytes": peak_bytes, "update_s": phases(problem, plan).update_s}
