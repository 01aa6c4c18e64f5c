"""The record of an executed cell: its outcome, and the hosts and the job that ran the cell."""

import msgspec
from msgspec import Struct

from rematbench.worlds.records.record import FORMAT, Record, RecordError
from rematbench.worlds.slurm.cells import CampaignCell, CellStatus
from rematbench.worlds.slurm.nodefacts import NodeFacts

MAX_ATTEMPTS = 3
"""Attempts, each in a job that may be preempted or killed, after which a cell counts as failed."""


class CellRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome of a cell.  `record` is the run's record, written by the cell's processes.
    `final` is false where another attempt is due.  `wall_s` includes imports and start-up, so no
    table shows it."""

    key: str
    cell: CampaignCell
    status: CellStatus
    final: bool = True
    reason: str = ""
    attempts: int
    job_id: str = ""
    written: str
    wall_s: float = 0.0
    hosts: tuple[NodeFacts, ...] = ()
    remarks: tuple[str, ...] = ()
    record: Record | None = None


def encode(record: CellRecord) -> bytes:
    """The stored bytes of a record: indented JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(data: bytes) -> CellRecord:
    """The record of stored bytes; RecordError for anything else."""
    try:
        return msgspec.json.decode(data, type=CellRecord)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        text = f"a stored cell is not a record of format {FORMAT}, the only one read here: {error}"
        raise RecordError(text) from error


def is_final(data: bytes) -> bool:
    """Whether a stored record needs no further attempt."""
    try:
        return decode(data).final
    except RecordError:
        return False
