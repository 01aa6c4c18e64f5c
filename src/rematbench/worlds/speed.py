"""What the measured seconds of a GPU's steps say: tokens/s per GPU, and MFU as simulated plans have
it."""

import re
import statistics
from collections.abc import Sequence

from msgspec import Struct

from rematbench.problem import Problem
from rematbench.simulate.evaluate import speed
from rematbench.spec.cluster import Cluster


class MeasuredSpeed(Struct, frozen=True, kw_only=True):
    """Of the median of the timed steps.  MFU are fractions of the cluster's dense bf16 peak
    (`peak` in words), None with the reason in `no_mfu` where the run's GPU is not the cluster's."""

    steps: int
    step_s: float
    step_min_s: float
    step_max_s: float
    tokens_per_s_per_gpu: float
    mfu_causal: float | None = None
    mfu_dense: float | None = None
    peak: str = ""
    no_mfu: str = ""


def measured_speed(problem: Problem, step_s: Sequence[float], device: str) -> MeasuredSpeed:
    """Of the timed steps' seconds (each of the slowest rank; at least one) on `device`, as torch
    names it."""
    median = statistics.median(step_s)
    found, cluster = speed(problem, median), problem.cluster
    known = has_peak_of(cluster, device)
    peak = f"of {cluster.peak_flop_per_s / 1e12:g} TFLOP/s, {cluster.gpu}"
    other = f"no MFU: {cluster.name} has the peak of {cluster.gpu}, this ran on {device}"
    return MeasuredSpeed(
        steps=len(step_s),
        step_s=median,
        step_min_s=min(step_s),
        step_max_s=max(step_s),
        tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
        mfu_causal=found.mfu_causal if known else None,
        mfu_dense=found.mfu_dense if known else None,
        peak=peak if known else "",
        no_mfu="" if known else other,
    )


def has_peak_of(cluster: Cluster, device: str) -> bool:
    """Whether the cluster's peak is that of the GPU that torch calls `device`: its name holds the
    cluster's model number (H800 of H800-SXM5-80GB)."""
    if cluster.generation == "cpu":
        return False
    model = next(iter(_numbered(cluster.gpu)), cluster.gpu.upper())
    return model in (*_numbered(device), device.upper())


def _numbered(name: str) -> list[str]:
    """Words with a digit."""
    return [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if re.search(r"\d", word)]
