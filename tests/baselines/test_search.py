"""DeepSpeed's plan and stack against traces of jobs that nobody chose."""

from pathlib import Path

import pytest

from rematbench.worlds.packages.process import job, policy, run_jobs
from tests.baselines.cases import weighed
from tests.baselines.random_jobs import draw
from tests.installed import needs

NEAR, FAR, TILED = 1e-3, 0.01, 0.03
"""Of the peak, states and all: most jobs; any; with tiles (docs/packages.md says why)."""
FAST = (28, 118, 133, 171)
"""ZeRO 3 with its optimizer on the host; ZeRO 2 with Ulysses, tied; ZeRO 0 and (tied) ZeRO 1 with
inputs on the host."""
MANY = range(40)
SHARE = 0.85
"""Of many jobs, at least, are near."""


def deviations(seeds: tuple[int, ...] | range, folder: Path) -> dict[int, float]:
    """Predicted over traced, less 1, by seed."""
    needs("deepspeed")
    drawn = {seed: draw(seed) for seed in seeds}
    jobs = [
        job(one.problem, policy("deepspeed", one.settings), "traced", timeout_s=300.0)
        for one in drawn.values()
    ]
    found = {}
    records = run_jobs("deepspeed", jobs, folder)
    for (seed, one), record in zip(drawn.items(), records, strict=True):
        seen = record.measured
        assert seen is not None, (seed, record.reason)
        traced = seen.ranks[0].peak_bytes
        method = policy("deepspeed", one.settings)
        found[seed] = weighed(method, one.problem).device_peak / traced - 1
    return found


@pytest.mark.full
def test_drawn_jobs_weigh_what_is_predicted(tmp_path: Path) -> None:
    far = {seed: off for seed, off in deviations(FAST, tmp_path).items() if abs(off) > NEAR}
    assert not far


@pytest.mark.soak
def test_most_of_many_drawn_jobs_weigh_what_is_predicted(tmp_path: Path) -> None:
    found = deviations(MANY, tmp_path)
    for seed, off in found.items():
        tiled = any(name.endswith("_tiles") for name in draw(seed).settings)
        assert abs(off) < (TILED if tiled else FAR), seed
    assert sum(abs(off) < NEAR for off in found.values()) >= SHARE * len(found)
