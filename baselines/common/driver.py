"""Starts the ranks of each job, watches them, and writes a record for every job."""

import importlib
import os
import pickle
import sys
import threading
import time
import traceback
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

import msgspec
import torch
import torch.distributed as dist

from baselines.common import resources
from baselines.common.interface import NotRunnable, Rank, RankAnswer, Runner
from baselines.common.resources import require_memory
from rematbench.evaluate.result import Status
from rematbench.host.ranks import NO_RENDEZVOUS, RankError, error_of_job, record_status, run_ranks
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.measured import OF_CUDA, Engine, Measured, RankMeasured, whole_norms
from rematbench.worlds.records.record import Record, provenance, write_record
from rematbench.worlds.torch.case import failure
from rematbench.worlds.torch.devices import prepare

BYTES = ("activation_peak_bytes", "host_peak_bytes", "state_bytes", "host_state_bytes")


def write_record_of(
    runner: Runner,
    job: PackageJob,
    path: Path,
    status: Status,
    reason: str,
    answers: list[RankAnswer],
) -> None:
    """Write the record of a job, whatever its outcome; an `ok` record has every rank's answer."""
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
        stack=runner.stack() | (resources.cuda_versions() if on_gpus else {}),
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
            # Seconds measured on a CPU say nothing about performance.
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


START: dict[str, Literal["fork", "spawn"]] = {"cpu": "fork", "cuda": "spawn"}
"""How the processes of ranks start. A forked rank has the package imported already, but torch
refuses CUDA in the fork of a process that has counted its GPUs."""


def drive(name: str, jobs_path: Path, folder: Path) -> int:
    """Run every job; the exit code is 0 if every job has its record."""
    jobs = msgspec.json.decode(jobs_path.read_bytes(), type=list[PackageJob])
    torch.set_num_threads(1)
    if jobs and jobs[0].device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        prepare("cpu")  # on CUDA the package sets its variables first
    runner = cast(Runner, importlib.import_module(f"baselines.{name}.run"))
    traced = bool(jobs) and jobs[0].run.world == "traced"  # one process, even under srun
    if not traced and (launched := _launched()):
        return _as_rank(runner, jobs, folder, *launched)
    number = 0
    while number < len(jobs):
        last = number + _alike(jobs[number:])
        while number < last:
            number += _attempt(runner, jobs, number, last, folder)
    return 0


def _alike(jobs: list[PackageJob]) -> int:
    """The number of jobs at the start of the list that one set of processes can run. On GPUs it is
    one, because packages keep communicators and tensors as long as their process lives."""
    if jobs[0].device == "cuda" and jobs[0].run.world == "executed":
        return 1
    key = _key(jobs[0])
    return len(list(takewhile(lambda job: _key(job) == key, jobs)))


def _key(job: PackageJob) -> tuple[Any, ...]:
    return (job.run.world, job.run.layout.gpus, job.device)


def _launched() -> tuple[int, int, int] | None:
    """(rank, size, local rank) from the environment of torchrun or srun. None if the launcher
    started this process alone, which then starts the ranks itself. Exits with one line if the
    address where the ranks meet is missing."""
    names = (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    )
    for group in names:
        if all(name in os.environ for name in group):
            rank, size, local = (int(os.environ[name]) for name in group)
            if size == 1:
                return None
            if not all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")):
                sys.exit(NO_RENDEZVOUS)
            return rank, size, local
    return None


def _end_with(parent: int) -> None:
    """End this process when its parent has ended. Without this, a rank that waits for another rank
    would never end."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _attempt(runner: Runner, jobs: list[PackageJob], first: int, last: int, folder: Path) -> int:
    """Run jobs [first, last) in one set of processes. Returns the number of jobs that got a record;
    only the last of them may have failed."""
    job = jobs[first]
    why = _refusal(runner, job)
    if why is not None:
        write_record_of(runner, job, folder / f"{first}.json", "unsupported", why, [])
        return 1
    rest = range(first + 1, last)
    stop = next((i for i in rest if _refusal(runner, jobs[i]) is not None), last)
    numbers = list(range(first, stop))
    size = 1 if job.run.world == "traced" else job.run.layout.gpus
    scratch = folder / f"ranks-{first}"
    scratch.mkdir(parents=True, exist_ok=True)
    start = "fork" if job.run.world == "traced" else START[job.device]
    module = cast(ModuleType, runner).__name__  # a new process imports it by name
    ranks = [(module, jobs, numbers, scratch, rank, size) for rank in range(size)]
    ended = run_ranks(start, _rank_main, ranks, scratch, job.timeout_s)
    # Records have no status `timeout`, so a job that took too long has failed.
    ended = RankError("failed", ended.reason) if ended.status == "timeout" else ended
    return _collect(runner, jobs, numbers, scratch, size, folder, ended)


def _refusal(runner: Runner, job: PackageJob) -> str | None:
    """The reason not to start a job, determined before any process starts, or None."""
    try:
        resources.require_gpus(job, job.run.layout.gpus)
        require_memory(job)
        runner.refuse(job)
    except NotRunnable as error:
        return str(error)
    return None


def _collect(
    runner: Runner,
    jobs: list[PackageJob],
    numbers: list[int],
    scratch: Path,
    size: int,
    folder: Path,
    ended: RankError,
) -> int:
    for done, number in enumerate(numbers):
        paths = [scratch / f"{number}.{rank}.pt" for rank in range(size)]
        target = folder / f"{number}.json"
        if not all(path.exists() for path in paths):
            cause = error_of_job(sorted(scratch.glob(f"{number}.*.error")), ended)
            status, reason = record_status(cause.status, cause.reason)
            write_record_of(runner, jobs[number], target, status, reason, [])
            return done + 1
        answers: list[RankAnswer] = [pickle.loads(path.read_bytes()) for path in paths]
        if jobs[number].gradients:
            torch.save(answers[0].gradients, folder / f"{number}.gradients.pt")
        write_record_of(runner, jobs[number], target, "ok", "", answers)
    return len(numbers)


def _rank_main(
    module: str, jobs: list[PackageJob], numbers: list[int], scratch: Path, rank: int, size: int
) -> None:
    first, number = jobs[numbers[0]], numbers[0]
    runner = cast(Runner, importlib.import_module(module))
    place = Rank(rank=rank, size=size, local=rank, folder=scratch)
    try:
        if first.run.world == "executed":
            _join(runner, first, rank, size, f"file://{scratch}/rendezvous", rank)
        for number in numbers:
            _one(runner, jobs[number], number, place)
    except BaseException as error:
        (scratch / f"{number}.{rank}.error").write_text("\n".join(_outcome(error)))
        os._exit(1)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # so that no destructor of a package keeps a finished rank alive


def _join(runner: Runner, job: PackageJob, rank: int, size: int, method: str, local: int) -> None:
    """Connect to the other ranks. Packages read their rank from torchrun's variables."""
    backend = "gloo" if job.device == "cpu" else "nccl"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local))
    if job.device == "cuda":
        resources.take_gpu(local, size, runner.environment(job))
    limit = timedelta(seconds=job.timeout_s)
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=size, timeout=limit)


def _one(runner: Runner, job: PackageJob, number: int, rank: Rank) -> None:
    answer = runner.trace(job) if job.run.world == "traced" else runner.execute(job, rank)
    partial = rank.folder / f"{number}.{rank.rank}.part"
    partial.write_bytes(pickle.dumps(answer))
    partial.rename(rank.folder / f"{number}.{rank.rank}.pt")
    if dist.is_initialized() and job.run.world == "executed":
        dist.barrier()


def _outcome(error: BaseException) -> tuple[Status, str]:
    """The status and the reason of an exception for a record, in one line. The traceback of an
    unforeseen error is printed too."""
    if isinstance(error, NotRunnable):
        return "unsupported", " ".join(str(error).split())
    status, reason = failure(error)
    if status == "failed" and not RankError(status, reason).is_secondhand:
        traceback.print_exception(error)
    return record_status(status, " ".join(reason.split()))


def _as_rank(
    runner: Runner, jobs: list[PackageJob], folder: Path, rank: int, size: int, local: int
) -> int:
    """Run as one rank of every job under torchrun or srun; rank 0 writes the records. After a
    failure ranks may wait in different collectives, so later jobs are recorded as not run."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _join(runner, jobs[0], rank, size, "env://", local)
    failed = ""
    for number, job in enumerate(jobs):
        place = Rank(rank=rank, size=size, local=local, folder=folder)
        found: list[RankAnswer] = []
        outcome: tuple[Status, str] = ("failed", f"not run: {failed}")
        if not failed:
            outcome, found = _together(runner, job, place)
            failed = outcome[1] if outcome[0] in ("failed", "oom") else ""
        path = folder / f"{number}.json"
        first = not path.exists()  # the first rank that fails writes its reason
        if (rank == 0 and not failed) or (failed and first):
            write_record_of(runner, job, path, *outcome, found)
    if failed:
        os._exit(1)  # another rank may never reach a barrier
    dist.barrier()  # rank 0 has the store, which another rank may still need to join
    dist.destroy_process_group()
    return 0


def _together(
    runner: Runner, job: PackageJob, place: Rank
) -> tuple[tuple[Status, str], list[RankAnswer]]:
    """One job on all ranks: its outcome, and the answers of all ranks."""
    answers: list[RankAnswer | None] = [None] * place.size
    layout = job.run.layout
    try:
        if layout.gpus != place.size:
            raise NotRunnable(f"the launcher started {place.size} processes for {layout.gpus} GPUs")
        resources.require_gpus(job, 1)
        runner.refuse(job)
        resources.clear_memory()
        answer = runner.execute(job, place)
        if job.gradients and place.rank == 0:
            torch.save(answer.gradients, place.folder / f"{job.run.run_id}.gradients.pt")
        answer.gradients = {}
        dist.all_gather_object(answers, answer)
    except Exception as error:
        return _outcome(error), []
    return ("ok", ""), [answer for answer in answers if answer is not None]
