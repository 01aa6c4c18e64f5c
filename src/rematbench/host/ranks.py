"""The processes of one job's ranks on this machine: started together, watched, and ended."""

import multiprocessing as mp
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rematbench.host.rank_error import RankError, of_exits

POLL_S = 0.02
ERROR_GRACE_S = 10.0
"""Seconds in which a rank must end after its error: on CUDA its own kernels may hang."""


def run_ranks(
    start: Literal["fork", "spawn"],
    target: Callable[..., None],
    arguments: Sequence[tuple[Any, ...]],
    folder: Path,
    timeout_s: float,
) -> RankError:
    """Run `target` in a process per rank, and end them all.  The result is the error of a rank
    whose result is missing; ranks write results (`*.pt`) and errors (`*.error`) into `folder`."""
    context = mp.get_context(start)
    processes: list[Any] = []
    try:
        for words in arguments:
            process = context.Process(target=target, args=words)  # type: ignore[attr-defined]
            process.start()
            processes.append(process)
        return watch(processes, folder, timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join()


def watch(processes: Sequence[Any], folder: Path, timeout_s: float) -> RankError:
    """Wait until all processes are done, one process has died, or no result comes in time."""
    seen, since, failed_at = 0, time.monotonic(), 0.0
    while True:
        codes = [process.exitcode for process in processes]
        if any(codes):
            time.sleep(10 * POLL_S)  # meanwhile other ranks may write their reason, or be killed
            return of_exits([process.exitcode for process in processes])
        if all(code == 0 for code in codes):
            return RankError("failed", "a process ended without a result")
        finished = len(list(folder.glob("*.pt")))
        failed_at = failed_at or (time.monotonic() if any(folder.glob("*.error")) else 0.0)
        if failed_at and time.monotonic() - failed_at > ERROR_GRACE_S:
            return RankError("failed", "a rank failed and did not end")
        if finished != seen:
            seen, since = finished, time.monotonic()
        if time.monotonic() - since > timeout_s:
            return RankError("timeout", f"no result within {timeout_s:g} s")
        time.sleep(POLL_S)
