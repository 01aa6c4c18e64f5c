"""A run's folder goes with the run, also when the run is asked to end."""

import signal
import subprocess
import sys
from pathlib import Path

from rematbench.host.files import scratch

HOLD = """
import time
from rematbench.host.files import scratch
with scratch() as folder:
    (folder / "answer").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


def test_sigterm_leaves_no_folder() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as held:
        folder = Path(held.stdout.readline().strip())
        assert folder.is_dir()
        held.send_signal(signal.SIGTERM)
        assert held.wait(30) == 128 + signal.SIGTERM
    assert not folder.exists()


def test_who_hears_sigterm_hears_it_as_before() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with scratch() as folder:
            signal.raise_signal(signal.SIGTERM)
            assert folder.is_dir()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM] * 2  # also after the run
