"""Records of ranks that torchrun or srun started, with the error of the rank that failed first."""

import time
from pathlib import Path

from msgspec.structs import replace

from rematbench.host.ranks import (
    RankError,
    error_of_record,
    first_cause,
    read_errors,
    record_status,
    write_error,
)
from rematbench.worlds.records.record import Record, write_record

PATIENCE_S = 2.0
"""Seconds that rank 0, which saw only a broken connection, waits for the failed rank's error."""


def leave(record: Record, out: Path, rank: int, started: float) -> Record:
    """Write a rank's record to `out` and return it.  A record that is not a failure is written as
    it is (rank 0 alone has one).  A failed rank writes its error beside `out`; its record gets the
    error of the rank that failed first, among the errors written since `started` (seconds of the
    epoch).

    Of failed ranks, rank 0 writes the record; so does the rank that failed first, because rank 0
    may see only a broken connection; and so does any rank where `out` is missing or older than
    `started`, because rank 0 may have been killed.  Another rank only returns its record.
    """
    if record.status not in ("failed", "oom"):
        write_record(record, out)
        return record
    own = error_of_record(record.status, record.reason)
    write_error(out, rank, own)
    cause = _cause(own, out, started, PATIENCE_S if rank == 0 else 0.0)
    status, reason = record_status(cause.status, cause.reason)
    if cause.is_secondhand:
        reason = f"a rank has gone: {reason}"
    found = replace(record, status=status, reason=reason)
    silent = not out.exists() or out.stat().st_mtime < started
    if rank == 0 or silent or cause == own:
        write_record(found, out)
    return found


def _cause(own: RankError, out: Path, started: float, patience_s: float) -> RankError:
    """The first cause among the errors of the ranks.  Waits up to `patience_s` while every known
    error is only that a peer has gone."""
    until = time.monotonic() + patience_s
    while True:
        cause = first_cause([own, *read_errors(out, started)]) or own
        if not cause.is_secondhand or time.monotonic() >= until:
            return cause
        time.sleep(0.05)
