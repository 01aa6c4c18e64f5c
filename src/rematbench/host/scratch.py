"""The folder through which the processes of a run answer."""

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder, removed when the block ends, also by an error or by SIGTERM (which a scheduler
    or `kill` sends, and which by default would leave the folder behind)."""
    with _asked_to_end(), tempfile.TemporaryDirectory(prefix="rematbench-") as name:
        yield Path(name)


@contextmanager
def _asked_to_end() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, in the main thread and where no handler is set."""
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
    raise SystemExit(128 + number)  # what a shell reports of a signal
