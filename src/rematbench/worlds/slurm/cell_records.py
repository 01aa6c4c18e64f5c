"""The record of an executed cell (its outcome, and the job that ran the cell), and the removal of
finished records, so that their cells are due again."""

from collections.abc import Collection
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import Struct

from rematbench.host.console import CommandError
from rematbench.inputs.configfile import closest
from rematbench.worlds.records.record import FORMAT, Record, RecordError
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.campaign import Campaign, CampaignCell, CellStatus

MAX_ATTEMPTS = 3
"""Attempts, each in a job that may be preempted or killed, after which a cell counts as failed."""


class CellRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome of a cell.  `record` is the run's record, written by the cell's processes.
    `final` is false if another attempt is due.  `wall_s` includes imports and start-up, so it is
    not shown in tables."""

    key: str
    cell: CampaignCell
    status: CellStatus
    final: bool = True
    reason: str = ""
    attempts: int
    job_id: str = ""
    written: str
    record: Record | None = None


def encode(record: CellRecord) -> bytes:
    """The stored bytes of a record: indented JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(data: bytes) -> CellRecord:
    """The record in stored bytes; RecordError if the bytes are not a record."""
    try:
        return msgspec.json.decode(data, type=CellRecord)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        text = f"a stored cell is not a record of the supported format {FORMAT}: {error}"
        raise RecordError(text) from error


def is_final(data: bytes) -> bool:
    """Whether a stored record needs no further attempt."""
    try:
        return decode(data).final
    except RecordError:
        return False


def remove_records(
    campaign: Campaign,
    store: Store,
    results: Path,
    *,
    statuses: Collection[str],
    names: Collection[str] = (),
) -> dict[str, str]:
    """Remove the finished records with these statuses (with `names`, only records of the named
    cells) and return the status of each removed record by cell.

    Also removes the manifests of their bundles and the table in `results`: Snakemake knows only
    these files, and does not remake a missing manifest while the table exists.  CommandError for an
    unknown status or cell.
    """
    _check("status", statuses, get_args(CellStatus))
    _check("cell", names, [cell.name for cell in campaign.cells])
    gone: dict[str, str] = {}
    for bundle in campaign.bundles.values():
        for cell in bundle.cells:
            key = campaign.key(cell)
            data = store.finished(key)
            if data is None or (names and cell.name not in names):
                continue
            status = decode(data).status
            if status in statuses:
                (results / "executed.csv").unlink(missing_ok=True)
                (results / f"bundles/{bundle.name}.json").unlink(missing_ok=True)
                store.path(key).unlink(missing_ok=True)
                gone[cell.name] = status
    return gone


def _check(kind: str, words: Collection[str], allowed: Collection[str]) -> None:
    for word in words:
        if word not in allowed:
            hint = closest(word, allowed)
            raise CommandError(f"unknown {kind} {word!r}{hint} (known: {', '.join(allowed)})")
