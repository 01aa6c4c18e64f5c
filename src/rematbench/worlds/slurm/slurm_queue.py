"""Queries to Slurm: whether a job is alive, the jobs of an earlier run, and Snakemake's own
queries.

`wrap_executor` fixes two faults of snakemake-executor-plugin-slurm 2.8.0.  When every status query
of a round fails (the Slurm controller does not answer), `check_active_jobs` yields no job.  Its
caller then treats all jobs as ended, and Snakemake waits forever for unwatched jobs.  Also, after a
round in which no job ended, the executor waits 10 s longer before the next round, up to 180 s,
regardless of the profile.  So it notices the end of a 46 s job after 80 s.
"""

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

JOB_PREFIX = "rematbench_"
"""Prefix of our jobs' names (slurm-jobname-prefix in profiles/slurm/config.yaml)."""
PLUGIN = "snakemake_executor_plugin_slurm"
POLL_S = 2.0
ANSWER_S = 60.0
"""The longest wait for the answer of one Slurm command."""
PATIENCE_MINUTES = 10.0
"""The longest time that a run waits for a Slurm controller that does not answer."""
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "CONFIGURING", "STAGE_OUT", "SIGNALING")


class Unreachable(RuntimeError):
    """A Slurm command failed or did not answer."""


class Silent(Unreachable):
    """Slurm did not answer within the time that the run waits."""


def ask(*words: str, limit_s: float = ANSWER_S) -> list[str] | None:
    """Output lines of a Slurm command; None if the command is not installed.  Unreachable, with the
    last line of the error, if the command fails or takes more than `limit_s` seconds."""
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
    """Whether a job has, or may have, processes; None if Slurm does not answer."""
    try:
        lines = ask("squeue", "--noheader", f"--jobs={job_id}", "--format=%T")
    except Unreachable as error:
        return False if "Invalid job id" in str(error) else None
    return None if lines is None else any(line.strip() in RUNNING for line in lines)


class QueuedJob(Struct, frozen=True):
    """A job of an earlier run that is still in Slurm's queue."""

    job_id: str
    state: str


def queued_jobs(folder: Path, limit_s: float = ANSWER_S) -> list[QueuedJob]:
    """The jobs in the queue that a Snakemake in `folder` submitted."""
    form = "--format=%i|%T|%j|%Z"
    lines = ask("squeue", "--noheader", "--me", form, limit_s=limit_s) or []
    found = []
    for line in lines:
        job_id, state, name, place = line.split("|", 3)
        if name.startswith(JOB_PREFIX) and Path(place.strip()).resolve() == folder:
            found.append(QueuedJob(job_id, state))
    return found


def settle_jobs(
    folder: Path, *, cancel: bool, patience_s: float, say: Callable[[str], None]
) -> None:
    """Cancel the pending jobs of an earlier run in `folder`; cancel its running jobs (`cancel`) or
    wait for their end.  Return when no job is left.

    Silent if Slurm does not answer for `patience_s` seconds.
    """
    told: set[str] = set()
    while jobs := _queued(folder, patience_s, say):
        for job in jobs:
            ends = cancel or job.state not in RUNNING
            if job.job_id not in told:
                does = "cancelled" if ends else "waiting until it has finished its cells"
                say(f"job {job.job_id} of an earlier run is {job.state.lower()}: {does}")
            told.add(job.job_id)
            if ends and job.state != "COMPLETING":
                with contextlib.suppress(Unreachable):  # the next query lists it again
                    ask("scancel", job.job_id, limit_s=min(ANSWER_S, patience_s))
        time.sleep(POLL_S)


def _queued(folder: Path, patience_s: float, say: Callable[[str], None]) -> list[QueuedJob]:
    """The queued jobs; the query is repeated until Slurm answers.  Silent after `patience_s`
    seconds without an answer."""
    ends = time.monotonic() + patience_s
    limit_s, first = min(ANSWER_S, patience_s), ""
    while True:
        try:
            return queued_jobs(folder, limit_s)
        except Unreachable as error:
            if not first:
                first = str(error)
                say(f"waiting for Slurm, at most {patience_s / 60:.3g} minutes: {first}")
            limit_s = min(ANSWER_S, ends - time.monotonic() - POLL_S)
            if limit_s <= 0:
                text = f"Slurm did not answer for {patience_s / 60:.3g} minutes ({first})"
                raise Silent(text) from error
        time.sleep(POLL_S)


def wrap_executor(longest_s: float, executor: Any = None) -> bool:
    """Wrap an executor class once (None: the loaded plugin's), so that it keeps its jobs while
    Slurm does not answer, and waits at most `longest_s` seconds between two rounds of status
    queries.  False if there is no class to wrap."""
    module = sys.modules.get(PLUGIN)
    found = executor or getattr(module, "Executor", None)
    if found is None or not hasattr(found, "check_active_jobs"):
        return False
    if getattr(found, "is_wrapped", False):
        return True
    ask = found.check_active_jobs

    async def check_active_jobs(self: Any, active_jobs: Sequence[Any]) -> AsyncIterator[Any]:
        """The jobs that the plugin yields; every active job if no query was answered."""
        # The first rounds may run before the executor has its query counter.  An exception here
        # would end this thread silently, and Snakemake would wait for ever.
        answered = getattr(self, "_status_query_calls", 0)
        kept = []
        async for job in ask(self, active_jobs):
            kept.append(job)
            yield job
        if active_jobs and not kept and self._status_query_calls == answered:
            self.logger.warning(
                "Slurm does not answer: the state of its jobs will be read again later"
            )
            for job in active_jobs:
                yield job
        if (getattr(self, "_next_seconds_between_status_checks", None) or 0) > longest_s:
            self.next_seconds_between_status_checks = longest_s

    found.check_active_jobs = check_active_jobs
    found.is_wrapped = True
    return True
