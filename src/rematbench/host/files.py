"""Atomic file writes, and temporary folders for files that the processes of a run exchange."""

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a temporary name in the same folder, flush it to disk, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def scratch(prefix: str = "rematbench-", place: Path | None = None) -> Iterator[Path]:
    """A new folder (in `place`, by default in the system's folder for temporary files).  It is
    removed when the block ends, also after an error or after SIGTERM, whose default action would
    leave it behind."""
    with _exit_on_sigterm(), tempfile.TemporaryDirectory(prefix=prefix, dir=place) as name:
        yield Path(name)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit inside the block; does nothing outside the main thread or if
    another handler is set."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # a shell reports this status for a signal
