"""The processes of one job's ranks on this machine, and the errors that failing ranks write.

A rank writes its error next to the record, because the rank that writes the record may know only
that another rank has ended, and no exit code tells which rank failed first.
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
"""Seconds in which a rank must end after its error: on CUDA its own kernels may hang."""
RecordStatus = Literal["ok", "oom", "unsupported", "failed"]
"""The statuses of a record."""

NO_RENDEZVOUS = "set MASTER_ADDR and MASTER_PORT (torchrun does; srun does not)"
KILLED = "a process was killed by signal 9, probably because host memory ran out"
"""The most common cause of signal 9 is the kernel's out-of-memory killer."""
ABORTED = ": aborted, as NCCL's watchdog does when a collective fails or takes too long"
PEER_ERROR_WORDS = ("onnection", "imed out", "imeout")
"""Words in the message of an error that another process caused."""


class RankError(Struct, frozen=True):
    """A rank's error: a status (`failed`, `oom`, `nan`) and one line with the reason."""

    status: str
    reason: str

    @property
    def is_secondhand(self) -> bool:
        """Whether the error only reports that another rank has ended."""
        return any(word in self.reason for word in PEER_ERROR_WORDS)


def error_of_exit(code: int | None) -> RankError | None:
    """The error of a process that signal 9 killed, which could not write one; None for other exit
    codes."""
    return RankError("oom", KILLED) if code == -signal.SIGKILL else None


def error_of_exits(codes: Sequence[int | None]) -> RankError:
    """The error of a failed job from the exit codes of its ranks; a killed rank comes first."""
    dead = [(rank, code) for rank, code in enumerate(codes) if code]
    for rank, code in dead:
        killed = error_of_exit(code)
        if killed is not None:
            return RankError(killed.status, f"rank {rank}: {killed.reason}")
    rank, code = dead[0]
    why = ABORTED if code == -signal.SIGABRT else ""
    return RankError("failed", f"rank {rank} ended with exit code {code}{why}")


def error_of_job(error_files: Iterable[Path], failure: RankError) -> RankError:
    """The first cause among the errors that ranks wrote and the error of a killed rank; if there
    is none, `failure`, the error from the exit codes.  An error file has a status, a reason and
    possibly more lines."""
    killed = [failure] if failure.status == "oom" else []
    return first_cause([*_read(error_files), *killed]) or failure


def record_status(status: str, reason: str) -> tuple[RecordStatus, str]:
    """Return (status, reason) for a record.  A record has fewer statuses than a rank: `nan` and
    `timeout` become `failed`, and the reason then starts with their name."""
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
    """The error that probably came first: an error that does not report the end of another rank."""
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
    """Run `target` in a process for each rank, and end all processes.  Return the error for
    any rank whose result is missing.  Ranks write results (`*.pt`) and errors (`*.error`) into
    `folder`."""
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
    """Wait until all processes are done, one has died, or no result arrives within `timeout_s`."""
    seen, since, failed_at = 0, time.monotonic(), 0.0
    while True:
        codes = [process.exitcode for process in processes]
        if any(codes):
            time.sleep(10 * POLL_S)  # meanwhile other ranks may write their reason, or be killed
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
