"""What exit codes and words of ranks tell of a job."""

from pathlib import Path

import pytest

from rematbench.host.ranks import (
    ABORTED,
    KILLED,
    RankError,
    error_of_exit,
    error_of_exits,
    error_of_job,
)


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
