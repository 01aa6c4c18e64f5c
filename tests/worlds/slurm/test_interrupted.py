"""kill -9 of Snakemake, jobs that outlive it, scancel, preemption: no finished cell is lost or run
again."""

import json
import random
import sys
import time
from collections.abc import Iterable

import pytest

from tests.campaigns import suite_text, tiny
from tests.worlds.slurm.conftest import Cluster, kill_session
from tests.worlds.slurm.slow import HERE, TARGET, calls, check_whole, finished, make_slow

pytestmark = pytest.mark.slurm

CELLS = 6


@pytest.mark.full
def test_a_job_that_outlives_snakemake_may_run_beside_the_next(cluster: Cluster) -> None:
    """Killed while its job runs, and started again at once without waiting for that job."""
    make_slow(cluster.path, CELLS, seconds=6.0, beside=())
    run = cluster.begin(TARGET, *HERE)
    cluster.until(lambda: calls(cluster.path), "a first finished cell")
    kill_session(run)
    assert cluster.jobs("%i %T", "--states=RUNNING"), "the job should live on"
    kept = finished(cluster.path)
    again = cluster.resume(TARGET, *HERE)
    assert again.returncode == 0, again.stdout
    check_whole(cluster.path, CELLS, kept)
    assert_not_run_again(cluster, kept)


def assert_not_run_again(cluster: Cluster, kept: Iterable[str]) -> None:
    """Cells whose records are `kept` were run once: a plan may end before its record is written."""
    done = [str(32 * (n + 1)) for n in range(CELLS) if any(f"cell{n}." in name for name in kept)]
    assert {calls(cluster.path)[cell] for cell in done} <= {1}, "a finished cell was run again"


@pytest.mark.parametrize(
    "kills", [pytest.param(3, marks=pytest.mark.full), pytest.param(20, marks=pytest.mark.soak)]
)
def test_kills_each_followed_by_one_command(cluster: Cluster, kills: int) -> None:
    """At moments spread over the time that the first, undisturbed run took."""
    draw = random.Random(kills)
    make_slow(cluster.path, CELLS, seconds=1.0)
    start = time.monotonic()
    first = cluster.submit(TARGET, *HERE)
    assert first.returncode == 0, first.stdout
    whole = time.monotonic() - start
    for number in range(kills):
        make_slow(cluster.path, CELLS, seconds=1.01 + 0.01 * number)  # other code: due again
        before = len(finished(cluster.path))
        run = cluster.begin(TARGET, *HERE)
        moment = draw.uniform(0.05, 1.0) * whole
        time.sleep(moment)
        kill_session(run)
        kept, alive = finished(cluster.path), len(cluster.jobs())
        done = cluster.resume(TARGET, *HERE)
        sys.stdout.write(
            f"kill {number + 1} after {moment:.1f} of {whole:.1f} s: {len(kept) - before} of "
            f"{CELLS} cells finished by then, {alive} jobs alive, "
            f"{sum(calls(cluster.path).values()) - CELLS} cells run twice\n"
        )
        assert done.returncode == 0, done.stdout
        check_whole(cluster.path, CELLS, kept)
        assert len(finished(cluster.path)) == before + CELLS


@pytest.mark.full
def test_scancel_is_retried_and_repeats_no_finished_cell(cluster: Cluster) -> None:
    make_slow(cluster.path, CELLS, seconds=1.2, beside=())
    run = cluster.begin(TARGET, *HERE)
    cluster.until(lambda: finished(cluster.path), "a first finished cell")
    kept = finished(cluster.path)
    for line in cluster.jobs():
        cluster.tool("scancel", line.split()[0])
    text, _ = run.communicate()
    assert run.returncode == 0, text
    check_whole(cluster.path, CELLS, kept)
    assert_not_run_again(cluster, kept)


LONG = suite_text(
    [tiny("long", gpus=1, seq_len=64, global_batch=4, precision="fp32")],
    steps=4, cell_minutes=20, methods=["keep_all"],
)  # fmt: skip
"""Long enough to be preempted."""


def hurry(cluster: Cluster) -> None:
    """Slurm lets a requeued job wait two minutes; this one need not."""

    def begins() -> bool:
        for line in cluster.jobs("%i %T %j"):
            number, state, name = line.split(maxsplit=2)
            if name.startswith("rematbench") and state == "PENDING":
                cluster.tool("scontrol", "update", f"jobid={number}", "starttime=now")
            elif name.startswith("rematbench") and state == "RUNNING":
                return True
        return False

    cluster.until(begins, "the requeued job")


@pytest.mark.full
def test_a_preempted_cell_is_run_again(cluster: Cluster) -> None:
    """An urgent job takes the nodes; Slurm requeues ours, which goes on with the cell."""
    make_slow(cluster.path, CELLS)  # keep_all is there again
    (cluster.path / "config/measure.yaml").write_text(LONG)
    store = cluster.path / "results/measure/cells"
    run = cluster.begin("measure")
    cluster.until(lambda: list(store.glob(".long*/log")), "a launch")
    cluster.tool(
        *("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2")
    )
    cluster.until(lambda: not list(store.iterdir()), "the end of the preempted cell")
    hurry(cluster)
    text, _ = run.communicate()
    assert run.returncode == 0, text
    (path,) = store.iterdir()
    assert json.loads(path.read_text())["status"] == "ok"
