"""Who ends the process that started a job ends the job: no rank goes on by itself."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.worlds.torch.test_execute_cli import TINY

PATIENCE_S = 60.0
CODE = "import sys; from rematbench.cli.app import main; main()"


def ranks_of(pid: int) -> list[int]:
    """Processes that a launcher has started to run a rank."""
    servers = [child for child in children(pid) if "forkserver" in words_of(child)]
    return [rank for server in servers for rank in children(server)]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in text.split()]


def words_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="ascii")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(what: str, seen: Callable[[], bool]) -> None:
    """Wait for something that is asked again and again."""

    end = time.monotonic() + PATIENCE_S
    while not seen():
        assert time.monotonic() < end, what
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_process_that_started_them(how: signal.Signals, tmp_path: Path) -> None:
    words = ("execute", "keep_all", *TINY, "--gpus", "2", "--tp", "2", "--steps", "1000000")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CODE, *words, "--device", "cpu"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        until("the ranks do not start", lambda: len(ranks_of(launcher.pid)) == 2)
        ranks = ranks_of(launcher.pid)
        until("they do not meet", lambda: any(tmp_path.glob("rematbench-*/rendezvous")))
        try:
            launcher.send_signal(how)
            launcher.wait()
            until("a rank goes on", lambda: not any(map(is_running, ranks)))
        finally:
            for rank in filter(is_running, ranks):
                os.kill(rank, signal.SIGKILL)
