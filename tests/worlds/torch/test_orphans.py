"""Who ends the process that started a job ends the job: no rank goes on by itself."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rematbench.cli.app import main
from rematbench.host import ranks as host_ranks
from rematbench.host.ranks import RankError
from rematbench.worlds.records.record import read_record
from rematbench.worlds.torch import rank_processes
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


# -- under a launcher nothing of ours outlives the ranks -------------------------------------------


MEETS_AND_DIES = """
import os, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=2)
dist.new_group(backend="gloo")
os._exit(9)
"""
EXECUTE = "from rematbench.cli.app import main; main()"
WORDS = (
    "execute", "keep_all", "--model", "tiny-llama", "--cluster", "this-machine", "--device", "cpu",
    "--gpus", "2", "--tp", "2", "--seq-len", "32", "--steps", "1", "--timeout", "60",
)  # fmt: skip


def started(rank: int, port: int, code: str, *words: str) -> subprocess.Popen[str]:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **place, **meeting},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def ended(out: Path, dies: int, code: str = MEETS_AND_DIES) -> None:
    """Run two ranks, of which one (with this code) goes as soon as they have met."""
    port, words = free_port(), (*WORDS, "--out", str(out))
    ranks = [
        started(rank, port, code) if rank == dies else started(rank, port, EXECUTE, *words)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.communicate(timeout=120)
    assert ranks[1 - dies].returncode != 0


@pytest.mark.full
def test_a_killed_rank_0_leaves_a_record_by_the_other(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    out.write_text("of an earlier run")
    os.utime(out, (1, 1))
    ended(out, dies=0)
    record = read_record(out)
    assert record.status == "failed"
    assert record.reason.startswith("a rank process has ended: ")


NOTES = """
from pathlib import Path
from rematbench.host import ranks as host_ranks
{before}
host_ranks.write_error(Path({out!r}), 1, host_ranks.RankError("oom", "HBM is full"))
"""
BY_ANOTHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {notes!r}])
"""


@pytest.mark.parametrize(
    "when", ["at once", pytest.param("when it is gone", marks=pytest.mark.full)]
)
def test_rank_0_tells_the_other_ranks_cause(when: str, tmp_path: Path) -> None:
    """Rank 1 says why it ends (or a process does that holds none of its connections); rank 0, which
    only sees it gone, waits for that and repeats it, and not a note of an earlier run."""
    out = tmp_path / "record.json"
    host_ranks.write_error(out, 3, RankError("oom", "of an earlier run"))
    os.utime(f"{out}.error.3", (1, 1))
    saying = NOTES.format(out=str(out), before="")
    if when != "at once":
        late = NOTES.format(out=str(out), before="import time; time.sleep(0.5)")
        saying = BY_ANOTHER.format(notes=late)
    ended(out, dies=1, code=MEETS_AND_DIES.replace("os._exit", f"{saying}os._exit"))
    record = read_record(out)
    assert (record.status, record.reason) == ("oom", "HBM is full")


@pytest.mark.full
@pytest.mark.parametrize("address", ["localhost", "nowhere.invalid"])
def test_who_meets_nobody_says_so_in_one_line_and_a_record(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for key, value in {**place, "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(rank_processes, "LOOKUP_S", 0.0)
    out = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["rematbench", *WORDS, "--timeout", "1", "--out", str(out)])
    with pytest.raises(SystemExit) as exit_:
        main()
    (line,) = capfd.readouterr().err.splitlines()
    assert exit_.value.code == 2
    assert address in line
    assert "MASTER_ADDR" in line
    record = read_record(out)
    assert record.status == "failed"
    assert line.removeprefix("rematbench execute: ") in record.reason
