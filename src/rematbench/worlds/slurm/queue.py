"""Queries to Slurm: whether a job is alive, the nodes of partitions, jobs of an earlier run."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

JOB_PREFIX = "rematbench_"
"""Prefix of our jobs' names (slurm-jobname-prefix in profiles/slurm/config.yaml)."""
POLL_S = 2.0
ANSWER_S = 60.0
"""The longest wait for the answer of one Slurm command."""
PATIENCE_MINUTES = 10.0
"""The longest time that a run waits for a Slurm controller that does not answer."""
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "CONFIGURING", "STAGE_OUT", "SIGNALING")
UNLIMITED = 1 << 30


class Unreachable(RuntimeError):
    """A Slurm command failed or did not answer."""


class Silent(Unreachable):
    """Slurm did not answer for as long as the run waits."""


def ask(*words: str, limit_s: float = ANSWER_S) -> list[str] | None:
    """Output lines of a Slurm command; None where the command is not installed.  Unreachable, with
    the last line of its error, where it fails or takes more than `limit_s` seconds."""
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"{words[0]}: no answer within {limit_s:.3g} s") from error
    if done.returncode != 0:
        raise Unreachable((done.stderr.strip().splitlines() or [words[0]])[-1])
    return done.stdout.splitlines()


def job_alive(job_id: str) -> bool | None:
    """Whether a job has, or may have, processes; None without an answer of Slurm."""
    try:
        lines = ask("squeue", "--noheader", f"--jobs={job_id}", "--format=%T")
    except Unreachable as error:
        return False if "Invalid job id" in str(error) else None
    return None if lines is None else any(line.strip() in RUNNING for line in lines)


class Left(Struct, frozen=True):
    """A job of an earlier run that is still in Slurm's queue."""

    job_id: str
    state: str


def left_jobs(folder: Path, limit_s: float = ANSWER_S) -> list[Left]:
    """The jobs in the queue that a Snakemake in `folder` submitted."""
    form = "--format=%i|%T|%j|%Z"
    lines = ask("squeue", "--noheader", "--me", form, limit_s=limit_s) or []
    found = []
    for line in lines:
        job_id, state, name, place = line.split("|", 3)
        if name.startswith(JOB_PREFIX) and Path(place.strip()).resolve() == folder:
            found.append(Left(job_id, state))
    return found


def settle_jobs(
    folder: Path, *, cancel: bool, patience_s: float, say: Callable[[str], None]
) -> None:
    """Cancel the pending jobs of an earlier run in `folder`; cancel its running jobs (`cancel`) or
    wait for their end.  Return when no job is left.

    Silent where Slurm does not answer for `patience_s` seconds.
    """
    told: set[str] = set()
    while jobs := _patiently(folder, patience_s, say):
        for job in jobs:
            ends = cancel or job.state not in RUNNING
            if job.job_id not in told:
                does = "cancelled" if ends else "waiting for it to finish its cells"
                say(f"job {job.job_id} of an earlier run is {job.state.lower()}: {does}")
            told.add(job.job_id)
            if ends and job.state != "COMPLETING":
                with contextlib.suppress(Unreachable):  # the next query lists it again
                    ask("scancel", job.job_id, limit_s=min(ANSWER_S, patience_s))
        time.sleep(POLL_S)


def _patiently(folder: Path, patience_s: float, say: Callable[[str], None]) -> list[Left]:
    """The jobs that are left; queries are repeated until Slurm answers.  Silent after `patience_s`
    seconds without an answer."""
    ends = time.monotonic() + patience_s
    limit_s, first = min(ANSWER_S, patience_s), ""
    while True:
        try:
            return left_jobs(folder, limit_s)
        except Unreachable as error:
            if not first:
                first = str(error)
                say(f"waiting for Slurm, at most {patience_s / 60:.3g} minutes: {first}")
            limit_s = min(ANSWER_S, ends - time.monotonic() - POLL_S)
            if limit_s <= 0:
                text = f"Slurm did not answer for {patience_s / 60:.3g} minutes ({first})"
                raise Silent(text) from error
        time.sleep(POLL_S)


class Node(Struct, frozen=True, kw_only=True):
    """One node in one partition.  `minutes` is the partition's time limit; `default` and `up` are
    facts of the partition too."""

    partition: str
    name: str
    default: bool
    cpus: int
    mem_mb: int
    gres: str
    minutes: int
    up: bool

    def count(self, kind: str) -> int:
        """The number of GRES of a kind (`gpu`, `gpu:h800`) that the node has."""
        total = 0
        for entry in self.gres.split(","):
            words = entry.partition("(")[0].split(":")
            if words[: kind.count(":") + 1] == kind.split(":") and words[-1].isdigit():
                total += int(words[-1])
        return total


def partitions() -> list[Node] | None:
    """Every node of every partition; None where Slurm is not installed."""
    lines = ask("sinfo", "--noheader", "--Node", "--format=%P|%N|%c|%m|%G|%l|%a")
    if lines is None:
        return None
    found = []
    for line in lines:
        partition, name, cpus, mem, gres, limit, state = line.split("|")
        found.append(
            Node(
                partition=partition.rstrip("*"),
                name=name,
                default=partition.endswith("*"),
                cpus=int(cpus),
                mem_mb=int(mem.rstrip("+")),
                gres=gres,
                minutes=minutes(limit),
                up=state == "up",
            )
        )
    return found


def minutes(limit: str) -> int:
    """A limit of Slurm (`days-hours:minutes:seconds`) in whole minutes; UNLIMITED for no limit."""
    if limit in ("infinite", "UNLIMITED", "n/a"):
        return UNLIMITED
    days, _, rest = limit.rpartition("-")
    words = [int(word) for word in rest.split(":")]
    if days:
        words += [0] * (3 - len(words))
    hours, mins, _ = [0] * (3 - len(words)) + words
    return int(days or 0) * 1440 + hours * 60 + mins
