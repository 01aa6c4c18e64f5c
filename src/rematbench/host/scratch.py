"""A temporary folder through which the processes of one run exchange files."""

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder that is removed when the block ends, also after an error or SIGTERM (which
    schedulers and `kill` send, and which by default would leave the folder behind)."""
    with _asked_to_end(), tempfile.TemporaryDirectory(prefix="rematbench-") as name:
        yield Path(name)


@contextmanager
def _asked_to_end() -> Iterator[None]:
    """Turn SIGTERM into SystemExit; only in the main thread and where no other handler is set."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # the status that a shell reports for a signal
