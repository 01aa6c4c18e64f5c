"""Snakemake's Slurm executor forgets its jobs when Slurm does not answer, and asks ever later.

Seen with snakemake-executor-plugin-slurm 2.8.0: when every status query of a round fails (the
controller is away), `check_active_jobs` gives no job back, which means to its caller that all have
ended; Snakemake then waits for ever for results that nobody watches.  Wrapped, a round without one
successful query gives every job back, to be asked about again.

And after every round in which no job ended it waits 10 s longer before the next, up to 180 s,
whatever the profile says: a job of 46 s is noticed after 80.  Wrapped, it waits at most as told.
"""

import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

PLUGIN = "snakemake_executor_plugin_slurm"


def be_patient(longest_s: float, executor: Any = None) -> bool:
    """Wrap the executor class (by default the loaded plugin's), once; False if there is none.

    `longest_s`: between two rounds of status queries."""
    module = sys.modules.get(PLUGIN)
    found = executor or getattr(module, "Executor", None)
    if found is None or not hasattr(found, "check_active_jobs"):
        return False
    if getattr(found, "is_patient", False):
        return True
    ask = found.check_active_jobs

    async def check_active_jobs(self: Any, active_jobs: Sequence[Any]) -> AsyncIterator[Any]:
        """The plugin's, but no answer is not an end."""
        # The first rounds may come before the executor is made: it has no counter then, and what
        # this thread raises is lost with the thread, which nobody misses until for ever.
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
