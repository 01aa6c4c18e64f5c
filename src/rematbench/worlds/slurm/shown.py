"""The numbers of an executed cell as columns, for every engine, beside the simulated step and
peak."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rematbench.evaluate.evaluation import PlanEvaluation
from rematbench.problem import Problem
from rematbench.worlds.records.measured import OF_CUDA, Measured
from rematbench.worlds.records.record import Record
from rematbench.worlds.speed import measured_speed

SPEED = ("step_s", "step_min_s", "step_max_s", "tokens_per_s_per_gpu", "mfu_causal", "mfu_dense")
OURS = "rematbench"
"""The engine's name of our executor."""

COLUMNS = (
    *("engine", "kernels", "device", "torch", "losses", "gradient_norms"),
    *("timed_steps", *SPEED, "peak_device_bytes", *OF_CUDA),
    *("peak_host_bytes", "offload_bytes", "recompute_flop"),
    *("simulated_step_s", "simulated_peak_bytes", "step_error_percent", "peak_error_percent"),
)
"""Columns of a cell's row; an unknown value is empty."""


def engine_of(label: str, stack: Mapping[str, str]) -> str:
    """The label of a run, with the version of the package whose name begins the label."""
    package = next((name for name in stack if label.startswith(name)), "")
    return label.replace(package, f"{package} {stack[package]}", 1) if package else label


def columns(
    record: Record | None, problem: Problem, simulated: PlanEvaluation | None
) -> dict[str, Any]:
    """The values of COLUMNS for a cell.  Seconds of a CPU are no performance, so a CPU's row has no
    step.  A cell without a record has the simulated step and peak alone."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    found = record.measured if record else None
    if record is not None and found is not None:
        row |= _engine(record) | _numbers(found)
    on_cpu = problem.cluster.generation == "cpu" or row["device"].startswith("cpu")
    if simulated is not None:
        row["simulated_peak_bytes"] = max(simulated.peak_device_bytes)
        row["simulated_step_s"] = "" if on_cpu else simulated.step_s
    if found is None:
        return row
    if found.step_s:
        row |= _speed(found.step_s, row["device"], problem)
    if simulated is not None:
        expected = simulated.peak_device_bytes[found.fullest.pp]
        row["simulated_peak_bytes"] = expected
        if problem.workload.precision == "bf16":  # simulated states are those of bf16 training
            row["peak_error_percent"] = percent(row["peak_device_bytes"], expected)
        if found.step_s and row["simulated_step_s"]:
            row["step_error_percent"] = percent(row["step_s"], simulated.step_s)
    return row


def percent(measured: float, simulated: float) -> float:
    """The difference of a measured from a simulated value, in percent of the simulated value."""
    return round(100 * (measured / simulated - 1.0), 3)


def _engine(record: Record) -> dict[str, str]:
    """The columns of the engine that ran a cell: its name and version, kernels, device, torch."""
    found, origin = record.engine, record.provenance
    if found is None:
        return {
            "engine": f"{OURS} {origin.rematbench}",
            "kernels": f"{record.spec.attention} attention of torch",
            "device": origin.device,
            "torch": origin.torch,
        }
    return {
        "engine": engine_of(found.label, found.stack),
        "kernels": "; ".join(f"{what}: {kernel}" for what, kernel in found.kernels.items()),
        "device": found.device,
        "torch": found.stack.get("torch", ""),
    }


def _numbers(found: Measured) -> dict[str, Any]:
    """The columns of losses, gradient norms and bytes.  Device bytes are of the fullest rank."""
    top = found.fullest
    row: dict[str, Any] = {
        "peak_device_bytes": top.peak_bytes,
        "peak_host_bytes": max(rank.host_bytes for rank in found.ranks),
    }
    for key in ("losses", "gradient_norms"):
        row[key] = msgspec.json.encode(getattr(found, key)).decode() if getattr(found, key) else ""
    if top.allocated_bytes:
        row |= {key: getattr(top, key) for key in OF_CUDA}
    if top.actions:
        for key in ("offload_bytes", "recompute_flop"):
            row[key] = sum(getattr(rank, key) for rank in found.ranks)
    return row


def _speed(step_s: Sequence[float], device: str, problem: Problem) -> dict[str, Any]:
    made = measured_speed(problem, step_s, device)
    named = {key: getattr(made, key) for key in SPEED}
    row = {key: "" if value is None else value for key, value in named.items()}
    return row | {"timed_steps": made.steps}
