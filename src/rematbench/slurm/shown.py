"""The numbers of an executed cell as columns, whichever engine ran it: our executor's `Measured` or
what a package showed (`Observed`), beside the simulated step and peak."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from rematbench.problem import Problem
from rematbench.runs.measured import Measured
from rematbench.runs.record import Observed, Provenance
from rematbench.simulate.evaluate import PlanEvaluation
from rematbench.worlds.speed import measured_speed

OURS = "rematbench"
"""Our executor, as an engine."""

COLUMNS = (
    *("engine", "kernels", "device", "torch", "losses", "gradient_norms"),
    *("timed_steps", "step_s", "step_min_s", "step_max_s"),
    *("tokens_per_s_per_gpu", "mfu_causal", "mfu_dense"),
    *("peak_device_bytes", "allocated_bytes", "reserved_bytes", "pinned_bytes"),
    *("peak_host_bytes", "offload_bytes", "recompute_flop"),
    *("simulated_step_s", "simulated_peak_bytes", "step_error_percent", "peak_error_percent"),
)
"""Columns of every cell; an unknown value is empty."""


class Shown(Struct, frozen=True, kw_only=True):
    """The numbers of a run.  Bytes are those of `rank`, the fullest; `step_s` has the slowest rank
    of each timed step, on GPUs only; None is unknown."""

    engine: str
    kernels: str
    device: str
    torch: str
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    step_s: tuple[float, ...]
    rank: int
    peak_device_bytes: int
    peak_host_bytes: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    pinned_bytes: int | None = None
    offload_bytes: int | None = None
    recompute_flop: float | None = None


def shown(record: Mapping[str, Any]) -> Shown | None:
    """An executed record's numbers; None where it has none."""
    if record.get("measured"):
        origin = msgspec.convert(record["provenance"], Provenance)
        kernels = f"{record['spec']['attention']} attention of torch"
        return _of_ours(msgspec.convert(record["measured"], Measured), origin, kernels)
    if record.get("observed"):
        return _of_package(msgspec.convert(record["observed"], Observed))
    return None


def _of_ours(found: Measured, origin: Provenance, kernels: str) -> Shown:
    top = found.fullest
    on_gpu = bool(found.step_s)
    return Shown(
        engine=f"{OURS} {origin.rematbench}",
        kernels=kernels,
        device=origin.device,
        torch=origin.torch,
        losses=found.losses,
        gradient_norms=found.gradient_norms,
        step_s=found.step_s,
        rank=found.ranks.index(top),
        peak_device_bytes=top.peak_bytes,
        peak_host_bytes=max(rank.host_peak_bytes for rank in found.ranks),
        allocated_bytes=top.allocated_bytes if on_gpu else None,
        reserved_bytes=top.reserved_bytes if on_gpu else None,
        pinned_bytes=top.pinned_bytes if on_gpu else None,
        offload_bytes=sum(rank.offload_bytes for rank in found.ranks),
        recompute_flop=sum(rank.recompute_flop for rank in found.ranks),
    )


def _of_package(found: Observed) -> Shown:
    lives = zip(found.activation_peak_bytes, found.state_bytes, strict=True)
    peaks = [live + states for live, states in lives]
    rank = peaks.index(max(peaks))
    away = found.host_state_bytes or (0,) * len(peaks)
    hosts = [live + states for live, states in zip(found.host_peak_bytes, away, strict=True)]
    return Shown(
        engine=engine_of(found.label, found.stack),
        kernels="; ".join(f"{what}: {kernel}" for what, kernel in found.kernels.items()),
        device=found.device,
        torch=found.stack.get("torch", ""),
        losses=found.losses,
        gradient_norms=found.gradient_norm,
        step_s=found.slowest_s,
        rank=rank,
        peak_device_bytes=peaks[rank],
        peak_host_bytes=max(hosts),
        allocated_bytes=_of_rank(found.allocated_bytes, rank),
        reserved_bytes=_of_rank(found.reserved_bytes, rank),
        pinned_bytes=_of_rank(found.pinned_bytes, rank),
    )


def _of_rank(values: Sequence[int], rank: int) -> int | None:
    return values[rank] if values else None


def engine_of(label: str, stack: Mapping[str, str]) -> str:
    """A run's label with the version of the package that it begins with."""
    package = next((name for name in stack if label.startswith(name)), "")
    return label.replace(package, f"{package} {stack[package]}", 1) if package else label


def columns(
    found: Shown | None, problem: Problem, simulated: PlanEvaluation | None
) -> dict[str, Any]:
    """A value for each of COLUMNS.  A CPU's time is no performance, so a CPU's row has no step; a
    cell that no GPU has run yet has the simulated step alone."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    ran_on_cpu = found is not None and found.device.startswith("cpu")
    on_cpu = problem.cluster.generation == "cpu" or ran_on_cpu
    if simulated is not None:
        row["simulated_peak_bytes"] = max(simulated.peak_device_bytes)
        row["simulated_step_s"] = "" if on_cpu else simulated.step_s
    if found is None:
        return row
    row |= _numbers(found)
    if found.step_s:
        row |= _speed(found, problem)
    if simulated is not None:
        lay = problem.layout
        stage = found.rank // (lay.tp * lay.cp * lay.dp)
        expected = simulated.peak_device_bytes[stage]
        row["simulated_peak_bytes"] = expected
        if problem.workload.precision == "bf16":  # simulated states are those of bf16 training
            row["peak_error_percent"] = percent(found.peak_device_bytes, expected)
        if found.step_s and row["simulated_step_s"]:
            row["step_error_percent"] = percent(row["step_s"], simulated.step_s)
    return row


def percent(measured: float, simulated: float) -> float:
    """By how many percent of the simulated value the measured one exceeds it."""
    return round(100 * (measured / simulated - 1.0), 3)


def _numbers(found: Shown) -> dict[str, Any]:
    row = {
        key: value
        for key, value in msgspec.structs.asdict(found).items()
        if key in COLUMNS and value is not None
    }
    for key in ("losses", "gradient_norms"):
        row[key] = msgspec.json.encode(row[key]).decode() if row[key] else ""
    row["step_s"] = ""
    return row


def _speed(found: Shown, problem: Problem) -> dict[str, Any]:
    made = measured_speed(problem, found.step_s, found.device)
    mfu = {"mfu_causal": made.mfu_causal, "mfu_dense": made.mfu_dense}
    return {
        "timed_steps": made.steps,
        "step_s": made.step_s,
        "step_min_s": made.step_min_s,
        "step_max_s": made.step_max_s,
        "tokens_per_s_per_gpu": made.tokens_per_s_per_gpu,
        **{key: "" if value is None else value for key, value in mfu.items()},
    }
