"""The record of a job, from its outcome and the answers of its ranks."""

from pathlib import Path

import torch

from baselines.common import gpu
from baselines.common.contract import RankAnswer, Runner
from rematbench.evaluate.result import Status
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.measured import OF_CUDA, Engine, Measured, RankMeasured, whole_norms
from rematbench.worlds.records.record import Record, provenance, write_record

BYTES = ("activation_peak_bytes", "host_peak_bytes", "state_bytes", "host_state_bytes")


def write(
    runner: Runner,
    job: PackageJob,
    path: Path,
    status: Status,
    reason: str,
    answers: list[RankAnswer],
) -> None:
    """Write the record of a job, whatever its outcome; with every rank's answer if it is `ok`."""
    record = Record(
        run_id=job.run.run_id,
        spec=job.run,
        status=status,
        reason=reason,
        measured=_measured(job, answers) if answers else None,
        engine=_engine(runner, job, answers[0]) if answers else None,
        provenance=provenance(),
    )
    write_record(record, path)


def _engine(runner: Runner, job: PackageJob, first: RankAnswer) -> Engine:
    traced, on_gpus = job.run.world == "traced", _on_gpus(job)
    return Engine(
        label=first.label,
        stack=runner.stack() | (gpu.stack() if on_gpus else {}),
        shim=first.shim,
        kernels=first.kernels,
        device=torch.cuda.get_device_name() if on_gpus else "cpu",
        backend="fake" if traced else ("gloo" if job.device == "cpu" else "nccl"),
    )


def _measured(job: PackageJob, answers: list[RankAnswer]) -> Measured:
    first, lay = answers[0], job.run.layout
    start = job.rank if job.run.world == "traced" else 0
    on_gpus = _on_gpus(job)
    names = (*BYTES, *(OF_CUDA if on_gpus else ()))
    ranks = tuple(
        RankMeasured(
            rank=number,
            pp=number // (lay.gpus // lay.pp),
            # Seconds of a CPU are never performance.
            step_s=tuple(answer.step_s) if on_gpus else (),
            **{name: getattr(answer, name) for name in names},
        )
        for number, answer in enumerate(answers, start)
    )
    return Measured(
        losses=tuple(first.losses),
        gradient_norms=whole_norms(first.gradient_norms),
        parameter_norms=tuple(first.gradient_norms),
        ranks=ranks,
        warmup_steps=job.steps + job.warmup if on_gpus else 0,
    )


def _on_gpus(job: PackageJob) -> bool:
    return job.device == "cuda" and job.run.world != "traced"
