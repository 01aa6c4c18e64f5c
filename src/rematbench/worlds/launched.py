"""What a rank that torchrun or srun started leaves behind, so that a record says what failed."""

import time
from pathlib import Path

from msgspec.structs import replace

from rematbench.runs import rank_error
from rematbench.runs.rank_error import RankError
from rematbench.runs.record import Record, write_record

PATIENCE_S = 2.0
"""How long rank 0, which only saw a peer go, waits for that peer's word."""


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
