"""Wrap Snakemake's Slurm executor, so that it does not lose jobs while Slurm does not answer, and
does not notice late that a job has ended.

Both faults are of snakemake-executor-plugin-slurm 2.8.0.  When every status query of a round fails
(the Slurm controller is away), `check_active_jobs` yields no job.  Its caller takes that for the
end of all jobs, and Snakemake waits for ever for jobs that nothing watches.  With the wrapper, a
round without a successful query yields every job, so that the next round asks about all of them.

After a round in which no job ended, the executor waits 10 s longer before the next round, up to
180 s, whatever the profile says: it notices the end of a job of 46 s after 80 s.  The wrapper
bounds the wait.
"""

import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

PLUGIN = "snakemake_executor_plugin_slurm"


def be_patient(longest_s: float, executor: Any = None) -> bool:
    """Wrap an executor class once (None: the loaded plugin's).  False where there is no class to
    wrap.  `longest_s`: the longest wait in seconds between two rounds of status queries."""
    module = sys.modules.get(PLUGIN)
    found = executor or getattr(module, "Executor", None)
    if found is None or not hasattr(found, "check_active_jobs"):
        return False
    if getattr(found, "is_patient", False):
        return True
    ask = found.check_active_jobs

    async def check_active_jobs(self: Any, active_jobs: Sequence[Any]) -> AsyncIterator[Any]:
        """The jobs that the plugin yields; every active job where no query was answered."""
        # The first rounds may run before the executor has its query counter.  An exception here
        # would end this thread silently, and Snakemake would wait for ever.
        answered = getattr(self, "_status_query_calls", 0)
        kept = []
        async for job in ask(self, active_jobs):
            kept.append(job)
            yield job
        if active_jobs and not kept and self._status_query_calls == answered:
            self.logger.warning("Slurm does not answer: its jobs are asked for again later")
            for job in active_jobs:
                yield job
        if (getattr(self, "_next_seconds_between_status_checks", None) or 0) > longest_s:
            self.next_seconds_between_status_checks = longest_s

    found.check_active_jobs = check_active_jobs
    found.is_patient = True
    return True
