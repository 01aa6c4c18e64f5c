"""The speed of measured steps on GPUs: tokens/s per GPU, and MFU by the formula of simulated
plans."""

import re
import statistics
from collections.abc import Sequence

from msgspec import Struct

from rematbench.evaluate.evaluation import speed
from rematbench.problem import Problem
from rematbench.spec.cluster import Cluster


class MeasuredSpeed(Struct, frozen=True, kw_only=True):
    """The speed of a run: `step_s` is the median of its timed `steps`, and the rates are of that
    median.  MFU are fractions of the cluster's dense bf16 peak (`peak` names the peak); they are
    None, with the reason in `no_mfu`, where the GPU of the run is not the cluster's."""

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
    """The speed of a run with these timed steps (seconds of the slowest rank in each; at least one
    step) on `device`, as torch names the GPU."""
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
    """Whether `device`, torch's name of a GPU, is the GPU of the cluster: the name contains the
    model number of the cluster's GPU (H800 of H800-SXM5-80GB).  False for a CPU cluster."""
    if cluster.generation == "cpu":
        return False
    model = next(iter(_numbered(cluster.gpu)), cluster.gpu.upper())
    return model in (*_numbered(device), device.upper())


def same_gpu(published: str, device: str) -> bool:
    """Whether a published name of a GPU has the model number of `device`, as torch names it."""
    return _numbered(published)[:1] == _numbered(device)[:1] != []


def _numbered(name: str) -> list[str]:
    """The words of a name that contain a digit, in upper case."""
    return [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if re.search(r"\d", word)]
