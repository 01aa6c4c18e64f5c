"""A process that torchrun or srun may have started: its place among theirs, and what a rank that
fails leaves behind for the record."""

import time
from pathlib import Path
from typing import Annotated

from msgspec.structs import replace
from typer import Option

from rematbench.host.console import CommandError
from rematbench.runs import rank_error
from rematbench.runs.rank_error import RankError
from rematbench.runs.record import Record, write_record

Rank = Annotated[int | None, Option(envvar=["RANK", "SLURM_PROCID"], hidden=True)]
Size = Annotated[int | None, Option(envvar=["WORLD_SIZE", "SLURM_NTASKS"], hidden=True)]
Local = Annotated[int, Option(envvar=["LOCAL_RANK", "SLURM_LOCALID"], hidden=True)]
Address = Annotated[str, Option(envvar="MASTER_ADDR", hidden=True)]
Port = Annotated[int, Option(envvar="MASTER_PORT", hidden=True)]

PATIENCE_S = 2.0
"""How long rank 0, which only saw a peer go, waits for that peer's word."""


def is_launched(
    rank: int | None, world_size: int | None, meeting: tuple[str, int], gpus: int
) -> bool:
    """Whether a launcher started this process as one of several (a single one starts its ranks
    itself); CommandError if they cannot be the layout's ranks."""
    if rank is None or world_size is None or world_size == 1:
        return False
    if world_size != gpus:
        raise CommandError(f"--gpus {gpus}: the launcher started {world_size} processes")
    if not 0 <= rank < world_size:
        raise CommandError(
            f"RANK (or SLURM_PROCID) {rank}: the ranks of {world_size} processes are 0 to "
            f"{world_size - 1}"
        )
    if not all(meeting):
        raise CommandError(rank_error.NO_MEETING)
    return True


def leave(record: Record, out: Path, rank: int, started: float) -> Record:
    """Write a rank's record: of a job that ended well its own (rank 0 has one), else that of the
    rank that failed first, as far as it is known by now; what was written, or would have been.

    A failing rank's error goes beside `out`.  Rank 0 writes, and so does the rank that failed first
    (rank 0 may only see a peer go) and any where rank 0, killed, has left none since `started`.
    """
    if record.status not in ("failed", "oom"):
        write_record(record, out)
        return record
    own = rank_error.of_record(record.status, record.reason)
    rank_error.note(out, rank, own)
    cause = _cause(own, out, started, PATIENCE_S if rank == 0 else 0.0)
    status, reason = rank_error.recorded(cause.status, cause.reason)
    if cause.is_secondhand:
        reason = f"a rank has gone: {reason}"
    found = replace(record, status=status, reason=reason)
    silent = not out.exists() or out.stat().st_mtime < started
    if rank == 0 or silent or cause == own:
        write_record(found, out)
    return found


def _cause(own: RankError, out: Path, started: float, patience_s: float) -> RankError:
    """The first cause among the ranks' errors, waited for where all that is known is that a peer
    has gone."""
    until = time.monotonic() + patience_s
    while True:
        cause = rank_error.first_cause([own, *rank_error.noted(out, started)]) or own
        if not cause.is_secondhand or time.monotonic() >= until:
            return cause
        time.sleep(0.05)
