"""The memory that this process may use, by the limits of its control groups."""

from pathlib import Path

from rematbench.host.memory import cgroup_limit


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    inner = tmp_path / "cg/job/step"
    inner.mkdir(parents=True)
    (tmp_path / "cg/job/memory.max").write_text("1000\n")
    (inner / "memory.max").write_text("max\n")
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    assert cgroup_limit(tmp_path / "cg", own) == 1000
