"""Run the ranks of a job as processes on this machine, and find the error that came first.

A failing rank writes its error into a file next to the record.  The rank that writes the record may
see only that a peer has ended, and exit codes do not show which rank failed first.
"""

import multiprocessing as mp
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from rematbench.host.files import write_atomically

POLL_S = 0.02
ERROR_GRACE_S = 10.0
"""Seconds that a rank gets to exit after it wrote an error; on CUDA its own kernels may hang."""
RecordStatus = Literal["ok", "oom", "unsupported", "failed"]
"""The statuses of a record."""

NO_RENDEZVOUS = "set MASTER_ADDR and MASTER_PORT (torchrun does; srun does not)"
KILLED = "a process was killed by signal 9, probably because host memory ran out"
"""The most common cause of signal 9 is the kernel's out-of-memory killer."""
ABORTED = ": aborted, as NCCL's watchdog does when a collective fails or takes too long"
PEER_ERROR_WORDS = ("onnection", "imed out", "imeout")
"""Parts of error messages that a rank raises because a peer has ended."""


class RankError(Struct, frozen=True):
    """Why a rank failed: a status (`failed`, `oom`, `nan`, `timeout`) and the reason in a line."""

    status: str
    reason: str

    @property
    def is_secondhand(self) -> bool:
        """Whether the error only reports that another rank has ended."""
        return any(word in self.reason for word in PEER_ERROR_WORDS)


def error_of_exit(code: int | None) -> RankError | None:
    """The error of a process that signal 9 killed, because such a process cannot write an error
    file; None for other exit codes."""
    return RankError("oom", KILLED) if code == -signal.SIGKILL else None


def error_of_exits(codes: Sequence[int | None]) -> RankError:
    """The error of a failed job by the exit codes of its ranks; a killed rank takes precedence."""
    dead = [(rank, code) for rank, code in enumerate(codes) if code]
    for rank, code in dead:
        killed = error_of_exit(code)
        if killed is not None:
            return RankError(killed.status, f"rank {rank}: {killed.reason}")
    rank, code = dead[0]
    why = ABORTED if code == -signal.SIGABRT else ""
    return RankError("failed", f"rank {rank} ended with exit code {code}{why}")


def error_of_job(error_files: Iterable[Path], failure: RankError) -> RankError:
    """The probable first cause of a failure: among the errors that ranks wrote (a status line, a
    reason line, possibly more lines) and the kill of a rank; without those, `failure`, the error
    from the exit codes."""
    killed = [failure] if failure.status == "oom" else []
    return first_cause([*_read(error_files), *killed]) or failure


def record_status(status: str, reason: str) -> tuple[RecordStatus, str]:
    """The (status, reason) of a record.  Records have fewer statuses than ranks: `nan` and
    `timeout` become `failed`, with their name at the start of the reason."""
    if status in ("nan", "timeout"):
        return "failed", f"{status}: {reason}"
    return msgspec.convert(status, RecordStatus), reason


def error_of_record(status: str, reason: str) -> RankError:
    """The error of a record that is not ok; the status `nan` is restored from the reason."""
    kind, _, rest = reason.partition("nan: ")
    return RankError("nan", rest) if not kind and rest else RankError(status, reason)


def write_error(record: Path, rank: int, error: RankError) -> None:
    """Write a rank's error next to the record of its run."""
    text = f"{error.status}\n{' '.join(error.reason.split())}\n"
    write_atomically(_path(record, str(rank)), text.encode())


def read_errors(record: Path, since: float = 0.0) -> list[RankError]:
    """The errors that ranks wrote after `since` (seconds of the epoch), by rank."""
    paths = sorted(record.parent.glob(_path(record, "*").name))
    paths = [path for path in paths if path.stat().st_mtime >= since]
    return _read(paths)


def _read(paths: Iterable[Path]) -> list[RankError]:
    return [RankError(*path.read_text(encoding="utf-8").splitlines()[:2]) for path in paths]


def first_cause(errors: Iterable[RankError]) -> RankError | None:
    """The error that probably came first: preferably one that does not report a peer's end."""
    return min(errors, key=lambda error: error.is_secondhand, default=None)


def _path(record: Path, rank: str) -> Path:
    return record.with_name(f"{record.name}.error.{rank}")


def run_ranks(
    start: Literal["fork", "forkserver", "spawn"],
    target: Callable[..., None],
    arguments: Sequence[tuple[Any, ...]],
    folder: Path,
    timeout_s: float,
) -> RankError:
    """Run `target` in one process per rank, end all processes, and return the error to report for
    ranks without a result.  Ranks write results (`*.pt`) and errors (`*.error`) into `folder`."""
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
    """Wait until all processes are done, one has died, or no new result came for `timeout_s`."""
    seen, since, failed_at = 0, time.monotonic(), 0.0
    while True:
        codes = [process.exitcode for process in processes]
        if any(codes):
            time.sleep(10 * POLL_S)  # gives the other ranks time to write errors or be killed
            return error_of_exits([process.exitcode for process in processes])
        if all(code == 0 for code in codes):
            return RankError("failed", "a process ended without a result")
        finished = len(list(folder.glob("*.pt")))
        failed_at = failed_at or (time.monotonic() if any(folder.glob("*.error")) else 0.0)
        if failed_at and time.monotonic() - failed_at > ERROR_GRACE_S:
            return RankError("failed", "a rank failed but its process did not exit")
        if finished != seen:
            seen, since = finished, time.monotonic()
        if time.monotonic() - since > timeout_s:
            return RankError("timeout", f"no result within {timeout_s:g} s")
        time.sleep(POLL_S)
