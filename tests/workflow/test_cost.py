"""What a thousand simulated cells cost through Snakemake; CPU seconds, as machines are shared."""

from pathlib import Path

import pytest

from benchmarks.workflow import checkout, run

LIMIT_S = 60


@pytest.mark.soak
def test_a_thousand_cells_in_a_minute_of_two_cores(tmp_path: Path) -> None:
    checkout(tmp_path, cells=1000, jobs=10)
    words = ["snakemake", "results/smoke/runs.csv", "--cores", "2", "--scheduler", "greedy"]
    cost = run(tmp_path, words)
    assert cost.cpu_s < LIMIT_S, "on one core alone, so within it on two"
    assert len((tmp_path / "results/smoke/runs.csv").read_text().splitlines()) == 1001
