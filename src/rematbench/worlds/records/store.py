"""The store of finished cells by key, safe if processes are killed or two jobs run one cell.

A process writes a record to a temporary name and renames it, so a record is complete or absent.  A
process creates KEY.lease.N (O_EXCL) before it runs a cell; N counts the attempts.  The process
touches its lease.  A lease is dead when its process is gone (seen on the same machine), its batch
job has left the queue, or its file is untouched for STALE_S.  A dead lease is never reused: the
next attempt creates KEY.lease.N+1, which only one process can do.
"""

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from rematbench.host.files import write_atomically

STALE_S = 60.0
"""Seconds without a touch, by the file system's clock, after which another host's lease is dead."""
BEAT_S = 5.0
POLL_S = 0.5

JobAlive = Callable[[str], bool | None]
"""A function that tells whether a batch job is still in the queue; None if that is unknown."""


class Holder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process that holds a lease, identified so that any host can tell whether it lives."""

    host: str
    boot: str
    pid: int
    started: int
    job_id: str = ""


class Lease(Struct, frozen=True, kw_only=True):
    """A process's claim on a cell; `attempt` counts from 1."""

    key: str
    attempt: int
    path: Path


def this_holder(job_id: str = "") -> Holder:
    """The Holder of this process."""
    return Holder(
        host=socket.gethostname(),
        boot=_boot(),
        pid=os.getpid(),
        started=start_time(os.getpid()) or 0,
        job_id=job_id,
    )


def _boot() -> str:
    """The boot and process namespace within which a pid names one process; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux: a lease of this machine is dead by age only
        return ""


def start_time(pid: int) -> int | None:
    """The kernel's start time of a live process; None if the process is gone (or a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


class Store:
    """A folder of finished cells (`KEY.json`) and of leases."""

    def __init__(
        self,
        folder: Path,
        *,
        job_id: str = "",
        job_alive: JobAlive | None = None,
        say: Callable[[str], None] = lambda text: None,
        is_final: Callable[[bytes], bool] = lambda data: True,
    ) -> None:
        """`is_final` tells whether a record's cell is finished (a preempted cell is not)."""
        self.folder = folder
        self.holder = this_holder(job_id)
        self.job_alive = job_alive or (lambda _: None)
        self.say = say
        self.is_final = is_final
        self._held: Lease | None = None
        self._beating = False
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        """The path of a cell's record."""
        return self.folder / f"{key}.json"

    def read(self, key: str) -> bytes | None:
        """The bytes of a cell's record, finished or not; None if there is none."""
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    def finished(self, key: str) -> bytes | None:
        """The bytes of a finished cell's record; None if the cell is not finished."""
        data = self.read(key)
        return data if data is not None and self.is_final(data) else None

    def claim(self, key: str, *, wait: bool = True) -> Lease | None:
        """Take the lease of an unfinished cell; None once the cell is finished (or, without `wait`,
        while another process holds the lease)."""
        told = False
        while self.finished(key) is None:
            number, latest = self.latest(key)
            if latest is not None and self.is_alive(latest):
                if not wait:
                    return None
                if not told:
                    self.say(f"waiting for {key}: {self.describe(latest)}")
                told = True
                time.sleep(POLL_S)
                continue
            lease = self._create(key, number + 1)
            if lease is not None:
                if lease.attempt > 1:
                    self._sweep(key)
                return lease
        self._remove_leases(key)  # a process was killed after it wrote the record
        return None

    def _create(self, key: str, attempt: int) -> Lease | None:
        path = self._lease(key, attempt)
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return None
        with os.fdopen(file, "wb") as opened:
            opened.write(msgspec.json.encode(self.holder))
        lease = Lease(key=key, attempt=attempt, path=path)
        if self.finished(key) is not None:  # finished after `claim` looked
            self._remove_leases(key)
            return None
        self._held = lease
        self._beat()
        return lease

    def commit(self, lease: Lease, data: bytes) -> bool:
        """Write the record and release the lease.  False, without writing, if another process took
        a later lease (this lease counted as dead): the other process's record stands."""
        self._held = None
        number, _ = self.latest(lease.key)
        if number != lease.attempt or self.finished(lease.key) is not None:
            self.say(f"{lease.key}: another job took the lease, and its record is kept")
            return False
        write_atomically(self.path(lease.key), data)
        if self.is_final(data):
            self._remove_leases(lease.key)
        else:
            self.release(lease)
        return True

    def release(self, lease: Lease) -> None:
        """Mark the lease as dead at once, so that the next claim starts another attempt."""
        self._held = None
        ended = msgspec.structs.replace(self.holder, pid=0, started=0, boot="ended")
        write_atomically(lease.path, msgspec.json.encode(ended))

    def latest(self, key: str) -> tuple[int, Path | None]:
        """The number and path of the newest lease; (0, None) without a lease."""
        number = 0
        while self._lease(key, number + 1).exists():  # numbers have no gaps
            number += 1
        return number, self._lease(key, number) if number else None

    def _lease(self, key: str, number: int) -> Path:
        return self.folder / f"{key}.lease.{number}"

    def is_alive(self, path: Path) -> bool:
        """Whether the process that holds a lease lives."""
        try:
            holder, touched = _read_holder(path), path.stat().st_mtime
        except FileNotFoundError:
            return False
        if holder is not None:
            if holder.boot == "ended":
                return False
            if holder.boot and holder.boot == self.holder.boot:
                return start_time(holder.pid) == holder.started
            if holder.job_id and holder.job_id == self.holder.job_id:
                return False  # Slurm requeued this job: its earlier start has ended
            if holder.job_id and self.job_alive(holder.job_id) is False:
                return False
        return self._file_system_time() - touched < STALE_S

    def describe(self, path: Path) -> str:
        """A clause that names the process that holds a lease."""
        holder = _read_holder(path)
        if holder is None:
            return "held"
        job = f"job {holder.job_id}, " if holder.job_id else ""
        return f"held by {job}process {holder.pid} on {holder.host}"

    def _file_system_time(self) -> float:
        """The present time of the file system's clock, which stamps the leases of all machines."""
        clock = self.folder / f".clock.{self.holder.host}.{self.holder.pid}"
        clock.touch()
        now = clock.stat().st_mtime
        clock.unlink(missing_ok=True)
        return now

    def _remove_leases(self, key: str) -> None:
        """Remove a finished cell's leases, the last first, so that no number is skipped."""
        for number in range(self.latest(key)[0], 0, -1):
            self._lease(key, number).unlink(missing_ok=True)

    def _sweep(self, key: str) -> None:
        """Remove the temporary files and folders of attempts that ended early."""
        for path in self.folder.glob(f".{key}.*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _beat(self) -> None:
        """Start the thread that touches the lease; once per process."""
        if not self._beating:
            self._beating = True
            threading.Thread(target=self._beats, daemon=True).start()

    def _beats(self) -> None:
        while True:
            time.sleep(BEAT_S)
            lease = self._held
            if lease is not None:
                try:
                    os.utime(lease.path)
                except FileNotFoundError:
                    continue


def _read_holder(path: Path) -> Holder | None:
    """The holder in a lease's file; None while the file is being written, or gone."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    except (FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError):
        return None
