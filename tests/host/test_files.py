"""A run's folder goes with the run, also when the run is asked to end."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rematbench.host.files import scratch
from rematbench.host.memory import cgroup_limit
from rematbench.host.ranks import (
    ABORTED,
    KILLED,
    RankError,
    error_of_exit,
    error_of_exits,
    error_of_job,
)

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


# -- the memory that this process may use, by the limits of its control groups ---------------------


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    inner = tmp_path / "cg/job/step"
    inner.mkdir(parents=True)
    (tmp_path / "cg/job/memory.max").write_text("1000\n")
    (inner / "memory.max").write_text("max\n")
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    assert cgroup_limit(tmp_path / "cg", own) == 1000


# -- what exit codes and words of ranks tell of a job ----------------------------------------------


@pytest.mark.parametrize(
    ("codes", "status", "reason"),
    [
        ([None, 1], "failed", "rank 1 ended with exit code 1"),
        ([1, -9], "oom", f"rank 1: {KILLED}"),
        ([-9, 1], "oom", f"rank 0: {KILLED}"),
        ([0, -6, 1], "failed", f"rank 1 ended with exit code -6{ABORTED}"),
    ],
)
def test_a_killed_process_is_out_of_memory(
    codes: list[int | None], status: str, reason: str
) -> None:
    assert error_of_exits(codes) == RankError(status, reason)
    assert [error_of_exit(code) is not None for code in codes] == [code == -9 for code in codes]


def test_what_a_rank_left_goes_before_what_is_seen(tmp_path: Path) -> None:
    """But not before a rank that was killed, if all that was left is that a peer has gone."""
    crashed, killed = RankError("failed", "rank 1 ended with exit code 1"), RankError("oom", KILLED)
    assert error_of_job([], crashed) == crashed
    lost, own = tmp_path / "0.error", tmp_path / "1.error"
    own.write_text("nan\nNotFinite: loss of step 0 is nan\nmore")
    for words in ("Connection closed by peer", "Timed out", "Timeout of 60 s"):
        lost.write_text(f"failed\nRuntimeError: {words}\nmore")
        assert error_of_job([lost], crashed).reason == f"RuntimeError: {words}"
        assert error_of_job([lost], killed) == killed
        assert error_of_job([lost, own], killed) == RankError(
            "nan", "NotFinite: loss of step 0 is nan"
        )
