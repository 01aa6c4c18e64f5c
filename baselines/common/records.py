"""A job's record, from its outcome and its ranks' answers."""

from pathlib import Path

import torch

from baselines.common import gpu
from baselines.common.contract import RankAnswer, Runner
from rematbench.choose.outcome import Status
from rematbench.packages.process import Job
from rematbench.runs.record import Observed, Record, provenance, write_record


def write(
    runner: Runner, job: Job, path: Path, status: Status, reason: str, answers: list[RankAnswer]
) -> None:
    """The record of a job, whatever its outcome; with every rank's answer if it ended well."""
    observed = _observed(runner, job, answers) if answers else None
    record = Record(
        run_id=job.run.run_id,
        spec=job.run,
        status=status,
        reason=reason,
        observed=observed,
        provenance=provenance(),
    )
    write_record(record, path)


def _observed(runner: Runner, job: Job, answers: list[RankAnswer]) -> Observed:
    first = answers[0]
    traced = job.run.world == "traced"
    hosts = tuple(a.host_state_bytes for a in answers)
    on_gpus = job.device == "cuda" and not traced
    return Observed(
        label=first.label,
        stack=runner.stack() | (gpu.stack() if on_gpus else {}),
        shim=first.shim,
        kernels=first.kernels,
        device=torch.cuda.get_device_name() if on_gpus else "cpu",
        backend="fake" if traced else ("gloo" if job.device == "cpu" else "nccl"),
        losses=tuple(first.losses),
        gradient_norms=tuple(first.gradient_norms),
        traced_ranks=(job.rank,) if traced else (),
        activation_peak_bytes=tuple(a.activation_peak_bytes for a in answers),
        host_peak_bytes=tuple(a.host_peak_bytes for a in answers),
        state_bytes=tuple(a.state_bytes for a in answers),
        host_state_bytes=hosts if any(hosts) else (),
        # A CPU's time is never performance.
        step_s=tuple(tuple(a.step_s) for a in answers) if on_gpus else (),
        allocated_bytes=tuple(a.allocated_bytes for a in answers) if on_gpus else (),
        reserved_bytes=tuple(a.reserved_bytes for a in answers) if on_gpus else (),
        pinned_bytes=tuple(a.pinned_bytes for a in answers) if on_gpus else (),
        warmup_steps=job.steps + job.warmup if on_gpus else 0,
    )
