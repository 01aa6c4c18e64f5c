"""Run the unfinished cells of a bundle one after the other, and write a record of each.

A cell that runs out of memory, crashes or reaches its time limit gets a record with that status,
and the next cell is run. A job that is ended (preemption, scancel, the allocation's limit) leaves
no record of the cell that it was running. The same command, run again, goes on with that cell.
"""

import datetime
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec
from msgspec import Struct

from rematbench.host.files import scratch, write_atomically
from rematbench.host.ranks import KILLED, error_of_record, first_cause, read_errors
from rematbench.inputs.configfile import require_among
from rematbench.worlds.records.record import FORMAT, Record, RecordError, read_record
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.campaign import Bundle, Campaign, CampaignCell
from rematbench.worlds.slurm.launch import LaunchResult, last_words, run_limited, torchrun

CellStatus = Literal["ok", "oom", "nan", "failed", "timeout", "unsupported"]
HOST_MEMORY = "host memory ran out, so the kernel or Slurm killed a process"
SIGNS: tuple[tuple[str, CellStatus, str], ...] = (
    ("OutOfMemoryError", "oom", ""),
    ("NotFinite", "nan", ""),
    ("oom_kill", "oom", HOST_MEMORY),
    ("oom-kill", "oom", HOST_MEMORY),
    ("Out Of Memory", "oom", HOST_MEMORY),
    ("exitcode: -9", "oom", KILLED),
)
"""(text in a launch's output, status, reason). An empty reason stands for the last error in the
output."""


class CellRecord(Struct, frozen=True, kw_only=True):
    """The outcome of a cell, and the job that ran the cell.  `record` is the run's record, written
    by the cell's processes."""

    key: str
    cell: CampaignCell
    status: CellStatus
    reason: str = ""
    job_id: str = ""
    written: str
    record: Record | None = None


def encode(record: CellRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(data: bytes) -> CellRecord:
    """The record in stored bytes; RecordError if the bytes are not a record."""
    try:
        return msgspec.json.decode(data, type=CellRecord)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        text = f"a stored cell is not a record of the supported format {FORMAT}: {error}"
        raise RecordError(text) from error


def run_bundle(
    campaign: Campaign,
    bundle: Bundle,
    store: Store,
    output: Path,
    *,
    job_id: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Run the unfinished cells of a bundle, in a Slurm job or (without `job_id`) on this machine,
    and write the bundle's manifest to `output`: key, status and reason of each cell. If no cell is
    left to run, the manifest has the same bytes as before."""
    rows = []
    for cell in bundle.cells:
        key = campaign.key(cell)
        if store.read(key) is None:
            with scratch(f".{key}.", store.folder) as folder:
                made = _run(campaign, bundle, cell, folder, job_id)
            say(f"{cell.name}: {made.status}{': ' if made.reason else ''}{made.reason}")
            store.write(key, encode(made))
            store.sweep(key)
        stored = decode(store.path(key).read_bytes())
        rows.append({"key": key, "status": stored.status, "reason": stored.reason})
    write_atomically(output, msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    counts = Counter(row["status"] for row in rows)
    text = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    say(f"{bundle.name}: {text}")


def _run(
    campaign: Campaign, bundle: Bundle, cell: CampaignCell, folder: Path, job_id: str
) -> CellRecord:
    out, limit = folder / "record.json", 60.0 * campaign.suite.cell_minutes
    words = [*campaign.words(cell), "--out", str(out), "--timeout", f"{limit:g}"]
    if job_id and campaign.center.slurm.gres and campaign.center.cluster.generation != "cpu":
        words += ["--device", "cuda"]  # without it, a cell that gets no GPU may take CPUs for hours
    command = torchrun(
        ["rematbench.cli.app", *words],
        nodes=bundle.nodes,
        gpus_per_node=bundle.gpus_per_node,
        job_id=job_id,
    )
    ended = run_limited(command, folder / "log", limit)
    record = read_record(out) if out.exists() else None
    if record is not None and record.status != "failed":
        # an executed record never has a simulated plan's other statuses
        status, reason = cast(CellStatus, record.status), record.reason
    else:
        status, reason = _why(ended, out, limit, record)
    return CellRecord(
        key=campaign.key(cell),
        cell=cell,
        status=status,
        reason=reason,
        job_id=job_id,
        written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        record=record,
    )


def _why(
    ended: LaunchResult, out: Path, limit_s: float, record: Record | None
) -> tuple[CellStatus, str]:
    """The status and reason of a failed launch.  The errors of all ranks are read, because a failed
    record may have only rank 0's error."""
    if ended.code is None:
        return "timeout", f"no result within {limit_s:.0f} s"
    errors = read_errors(out)
    if record is not None:
        errors.append(error_of_record(record.status, record.reason))
    cause = first_cause(errors)
    if cause is not None and not cause.is_secondhand:
        return msgspec.convert(cause.status, CellStatus), cause.reason
    for word, status, reason in SIGNS:
        if word in ended.stderr:
            return status, reason or last_words(ended.stderr)
    if cause is not None:
        return msgspec.convert(cause.status, CellStatus), cause.reason
    return "failed", f"exit code {ended.code}: {last_words(ended.stderr)}"


def remove_records(
    campaign: Campaign,
    store: Store,
    results: Path,
    *,
    statuses: Collection[str],
    names: Collection[str] = (),
) -> dict[str, str]:
    """Remove the records with these statuses (with `names`, only records of the named cells) and
    return the status of each removed record by cell.

    Also removes the manifests of their bundles and the table in `results`: Snakemake knows only
    these files, and does not remake a missing manifest while the table exists.  ConfigError for an
    unknown status or cell.
    """
    require_among(statuses, get_args(CellStatus), ("", "--again", "status"))
    require_among(names, [cell.name for cell in campaign.cells], ("", "--cell", "cell"))
    gone: dict[str, str] = {}
    for bundle in campaign.bundles.values():
        for cell in bundle.cells:
            key = campaign.key(cell)
            data = store.read(key)
            if data is None or (names and cell.name not in names):
                continue
            status = decode(data).status
            if status in statuses:
                (results / "executed.csv").unlink(missing_ok=True)
                (results / f"bundles/{bundle.name}.json").unlink(missing_ok=True)
                store.path(key).unlink(missing_ok=True)
                gone[cell.name] = status
    return gone
