"""The errors that failing ranks write beside the record.  The rank that writes the record may know
only that a peer left, and no exit code tells which rank failed first."""

import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from rematbench.host.files import write_atomically

Recorded = Literal["ok", "oom", "unsupported", "failed"]
"""The statuses of a record (`choose.outcome.Status`, which torch/ cannot import)."""

NO_MEETING = "set MASTER_ADDR and MASTER_PORT (torchrun does; srun does not)"
KILLED = "a process got signal 9: host memory, as far as can be known"
ABORTED = ": aborted, as NCCL's watchdog does when a collective fails or takes too long"
LOST_PEER = ("onnection", "imed out", "imeout")
"""Words of an error whose cause is in another process."""


class RankError(Struct, frozen=True):
    """A rank's error: a status (`failed`, `oom`, `nan`) and one line with the reason."""

    status: str
    reason: str

    @property
    def is_secondhand(self) -> bool:
        """Whether the error only reports that another rank has ended."""
        return any(word in self.reason for word in LOST_PEER)


def of_exit(code: int | None) -> RankError | None:
    """The error of a process that signal 9 killed, which wrote none; None for other exit codes."""
    return RankError("oom", KILLED) if code == -signal.SIGKILL else None


def of_exits(codes: Sequence[int | None]) -> RankError:
    """The error of a failed job from its ranks' exit codes; a killed rank comes first."""
    dead = [(rank, code) for rank, code in enumerate(codes) if code]
    for rank, code in dead:
        killed = of_exit(code)
        if killed is not None:
            return RankError(killed.status, f"rank {rank}: {killed.reason}")
    rank, code = dead[0]
    why = ABORTED if code == -signal.SIGABRT else ""
    return RankError("failed", f"rank {rank} ended with exit code {code}{why}")


def of_job(left: Iterable[Path], failure: RankError) -> RankError:
    """The first cause among the errors that ranks wrote (files of a status, a reason and more
    lines) and the error of a killed rank; else `failure`, which is the error from the exit
    codes."""
    seen = [failure] if failure.status == "oom" else []
    return first_cause([*_read(left), *seen]) or failure


def recorded(status: str, reason: str) -> tuple[Recorded, str]:
    """(status, reason) for a record, which has fewer statuses: NaN and timeout become `failed`,
    with their name before the reason."""
    if status in ("nan", "timeout"):
        return "failed", f"{status}: {reason}"
    return msgspec.convert(status, Recorded), reason


def of_record(status: str, reason: str) -> RankError:
    """The error of a record that is not ok; a NaN has its own status again."""
    kind, _, rest = reason.partition("nan: ")
    return RankError("nan", rest) if not kind and rest else RankError(status, reason)


def note(record: Path, rank: int, error: RankError) -> None:
    """Write a rank's error beside the record of its run."""
    text = f"{error.status}\n{' '.join(error.reason.split())}\n"
    write_atomically(_path(record, str(rank)), text.encode())


def noted(record: Path, since: float = 0.0) -> list[RankError]:
    """The errors that ranks wrote after `since` (seconds of the epoch), by rank."""
    paths = sorted(record.parent.glob(_path(record, "*").name))
    paths = [path for path in paths if path.stat().st_mtime >= since]
    return _read(paths)


def _read(paths: Iterable[Path]) -> list[RankError]:
    return [RankError(*path.read_text(encoding="utf-8").splitlines()[:2]) for path in paths]


def first_cause(errors: Iterable[RankError]) -> RankError | None:
    """The error that was most probably first: one that does not report another rank's end."""
    return min(errors, key=lambda error: error.is_secondhand, default=None)


def _path(record: Path, rank: str) -> Path:
    return record.with_name(f"{record.name}.error.{rank}")
