"""Run a bundle: run its unfinished cells one after the other, and write a record of each.

A cell that runs out of memory, crashes or reaches its time limit gets a record with that status,
and the runner goes on with the next cell.  A job that is ended (preemption, scancel, the
allocation's limit) exits with EXIT_UNFINISHED: finished cells stay finished, and the same command
goes on with the unfinished cells.
"""

import datetime
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgspec

from rematbench.host.files import write_atomically
from rematbench.host.ranks import KILLED, error_of_record, first_cause, read_errors
from rematbench.worlds.records.record import Record, read_record
from rematbench.worlds.records.store import Lease, Store
from rematbench.worlds.slurm.campaign import Bundle, Campaign, CampaignCell, CellStatus
from rematbench.worlds.slurm.cell_records import MAX_ATTEMPTS, CellRecord, decode, encode
from rematbench.worlds.slurm.launch import LaunchResult, last_words, run_limited, torchrun

EXIT_UNFINISHED = 75
"""Exit code for a command that can go on when it is run again (EX_TEMPFAIL of sysexits.h)."""
MARGIN_S = 30.0
"""Seconds at the end of an allocation that are left for writing records."""

HOST_MEMORY = "host memory: the kernel or Slurm killed a process for it"
SIGNS: tuple[tuple[str, CellStatus, str], ...] = (
    ("OutOfMemoryError", "oom", ""),
    ("NotFinite", "nan", ""),
    ("oom_kill", "oom", HOST_MEMORY),
    ("oom-kill", "oom", HOST_MEMORY),
    ("Out Of Memory", "oom", HOST_MEMORY),
    ("exitcode: -9", "oom", KILLED),
)
"""(words in a launch's output, status, reason).  Where the reason is empty, it is the last error in
the output."""


class Runner:
    """The run of one bundle, in a Slurm job or (without `job_id`) on this machine."""

    def __init__(
        self,
        campaign: Campaign,
        bundle: Bundle,
        store: Store,
        *,
        job_id: str = "",
        minutes: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`minutes`: the time that the job still has; 0 for no limit."""
        self.campaign = campaign
        self.bundle = bundle
        self.store = store
        self.job_id = job_id
        self.ends = time.monotonic() + 60 * minutes if minutes else float("inf")
        self.say = say
        self.stop = ""
        asked = bool(job_id and campaign.center.slurm.gres)
        on_gpus = asked and campaign.center.cluster.generation != "cpu"
        self.device = ["--device", "cuda"] if on_gpus else []  # else a cell may take CPUs for hours

    def run(self) -> list[CellRecord] | None:
        """Run the unfinished cells and return all records of the bundle.  None if cells are
        unfinished because the job was ended."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        keys = {self.campaign.key(cell): cell for cell in self.bundle.cells}
        for wait in (False, True):  # cells that another job is running come last
            for key, cell in keys.items():
                lease = None if self.stop else self.store.claim(key, wait=wait)
                if lease is not None:
                    self._run(cell, lease)
        if self.stop and any(self.store.finished(key) is None for key in keys):
            self.say(f"stopped: {self.stop}; run the same command to continue")
            return None
        found = [self.store.read(key) for key in keys]
        return [decode(data) for data in found if data is not None]

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        left = self.ends - time.monotonic()
        late = f", {left:.0f} s before its limit" if left < 1e6 else ""
        name = signal.Signals(number).name
        self.stop = f"the job was ended by {name} (preemption, scancel or a lost node){late}"

    def _run(self, cell: CampaignCell, lease: Lease) -> None:
        """Attempt a cell and commit its record, or release the lease if too little of the
        allocation's time is left."""
        if self.ends - time.monotonic() < 2 * MARGIN_S:
            self.stop = "the time limit of the allocation has passed"
            self.store.release(lease)
            return
        if lease.attempt > MAX_ATTEMPTS:
            reason = f"{MAX_ATTEMPTS} jobs ended without a record of this cell"
            made = self._record(cell, lease, "failed", reason)
        else:
            place = self.store.folder
            with tempfile.TemporaryDirectory(prefix=f".{lease.key}.", dir=place) as folder:
                made = self._launch(cell, lease, Path(folder))
        self.say(f"{cell.name}: {made.status}{': ' if made.reason else ''}{made.reason}")
        self.store.commit(lease, encode(made))

    def _launch(self, cell: CampaignCell, lease: Lease, folder: Path) -> CellRecord:
        left = self.ends - time.monotonic() - MARGIN_S
        limit = min(60.0 * self.campaign.suite.cell_minutes, left)
        out = folder / "record.json"
        words = [*self.campaign.words(cell), *self.device]
        words += ["--out", str(out), "--timeout", f"{limit:g}"]
        command = torchrun(
            ["rematbench.cli.app", *words],
            nodes=self.bundle.nodes,
            gpus_per_node=self.bundle.gpus_per_node,
            job_id=self.job_id,
        )
        ended = run_limited(command, folder / "log", limit, lambda: bool(self.stop))
        record = read_record(out) if out.exists() else None
        status: CellStatus
        if record is not None and record.status != "failed":
            # a record never has the status of an abandoned planner
            status, reason = cast(CellStatus, record.status), record.reason
        else:
            status, reason = self._why(ended, out, limit, record)
        return self._record(
            cell,
            lease,
            status,
            reason,
            final=status != "preempted" or lease.attempt >= MAX_ATTEMPTS,
            record=record,
        )

    def _why(
        self, ended: LaunchResult, out: Path, limit: float, record: Record | None
    ) -> tuple[CellStatus, str]:
        """The status and reason of a failed launch.  The errors of all ranks are read, because a
        failed record may have only rank 0's error."""
        if self.stop:
            return "preempted", self.stop
        if ended.code is None:
            return "timeout", f"no result within {limit:.0f} s"
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

    def _record(
        self, cell: CampaignCell, lease: Lease, status: CellStatus, reason: str, **more: Any
    ) -> CellRecord:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return CellRecord(
            key=lease.key,
            cell=cell,
            status=status,
            reason=reason,
            attempts=lease.attempt,
            job_id=self.job_id,
            written=now,
            **more,
        )


def finish(runner: Runner, output: Path) -> None:
    """Run a bundle, write its manifest to `output` (key, status and reason of each record; the same
    bytes on a second run) and print the number of cells by status.  Exits with EXIT_UNFINISHED
    if cells are left unfinished."""
    records = runner.run()
    if records is None:
        sys.exit(EXIT_UNFINISHED)
    rows = [{"key": r.key, "status": r.status, "reason": r.reason} for r in records]
    write_atomically(output, msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    counts = Counter(record.status for record in records)
    text = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    runner.say(f"{runner.bundle.name}: {text}")
