"""kill -9 of Snakemake, jobs that outlive it, scancel, preemption: nothing lost, nothing twice."""

import json
import random
import shutil
import subprocess
import sys
import time

import pytest

from tests.campaigns import suite_text, tiny
from tests.worlds.slurm.conftest import FAST, Cluster, kill_session
from tests.worlds.slurm.slow import HERE, TARGET, calls, finished, leftovers, make_slow, rows

pytestmark = pytest.mark.slurm

CELLS = 6


def resume(cluster: Cluster) -> "subprocess.CompletedProcess[str]":
    """What `./bench resume` runs."""
    return cluster.tool("rematbench", "resume", "--", TARGET, *HERE, *FAST)


def check_whole(cluster: Cluster, kept: dict[str, tuple[int, int]], cells: int) -> None:
    """Every cell is there once; what was finished before was not written again."""
    now = finished(cluster.path)
    assert len(now) == cells
    assert {name: now[name] for name in kept} == kept
    assert {record["status"] for record in rows(cluster.path)} == {"ok"}
    assert len(rows(cluster.path)) == cells
    assert not leftovers(cluster.path)


def kill_at(cluster: Cluster, seconds: float) -> dict[str, tuple[int, int]]:
    """Start, kill -9 after a while; what was finished by then."""
    run = cluster.begin(TARGET, *HERE)
    time.sleep(seconds)
    kill_session(run)
    return finished(cluster.path) if (cluster.path / "results/smoke/cells").is_dir() else {}


@pytest.mark.full
def test_a_live_job_is_not_run_beside(cluster: Cluster) -> None:
    """Killed while its job runs, and started again at once without waiting for that job."""
    make_slow(cluster.path, CELLS, beside=())
    run = cluster.begin(TARGET, *HERE)
    cluster.until(lambda: calls(cluster.path), "a first finished cell")
    kill_session(run)
    assert cluster.jobs(), "the job should live on"
    kept = finished(cluster.path)
    cluster.tool("snakemake", "--profile", "slurm", "--unlock", TARGET)
    again = cluster.submit(TARGET, *HERE)
    assert again.returncode == 0, again.stdout
    assert set(calls(cluster.path).values()) == {1}, "a cell was run twice"
    check_whole(cluster, kept, CELLS)


@pytest.mark.full
def test_kills_at_random_moments_then_one_command(cluster: Cluster) -> None:
    make_slow(cluster.path, CELLS, seconds=1.1)  # other code: every cell of slow is due again
    draw = random.Random(7)
    kept: dict[str, tuple[int, int]] = {}
    for _ in range(3):
        kept |= kill_at(cluster, draw.uniform(3, 12))
        shutil.rmtree(cluster.path / ".snakemake/locks", ignore_errors=True)  # as --unlock does
    done = resume(cluster)
    assert done.returncode == 0, done.stdout
    assert set(calls(cluster.path).values()) == {1}
    now = finished(cluster.path)
    assert {name: now[name] for name in kept} == kept
    assert not leftovers(cluster.path)
    assert not cluster.jobs()


@pytest.mark.full
def test_scancel_is_retried_and_repeats_no_finished_cell(cluster: Cluster) -> None:
    make_slow(cluster.path, CELLS, seconds=1.2, beside=())
    run = cluster.begin(TARGET, *HERE)
    cluster.until(lambda: calls(cluster.path), "a first finished cell")
    before = calls(cluster.path)
    for line in cluster.jobs():
        cluster.tool("scancel", line.split()[0])
    text, _ = run.communicate()
    assert run.returncode == 0, text
    assert {cell: calls(cluster.path)[cell] for cell in before} == before
    assert sum(calls(cluster.path).values()) == CELLS


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
def test_a_preempted_cell_is_a_row_and_then_a_result(cluster: Cluster) -> None:
    """An urgent job takes the nodes; Slurm requeues ours, which goes on with attempt 2."""
    make_slow(cluster.path, CELLS)  # keep_all is there again
    (cluster.path / "config/measure.yaml").write_text(LONG)
    store = cluster.path / "results/measure/cells"
    run = cluster.begin("measure")
    cluster.until(
        lambda: list(store.glob(".long*/record*")) or list(store.glob(".long*/log")), "a launch"
    )
    cluster.tool(
        *("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2")
    )
    cluster.until(lambda: list(store.glob("long.*.json")), "the row of the preempted cell")
    (path,) = store.glob("long.*.json")
    first = json.loads(path.read_text())
    assert first["status"] == "preempted"
    assert not first["final"]
    assert "SIGTERM" in first["reason"]
    hurry(cluster)
    text, _ = run.communicate()
    assert run.returncode == 0, text
    last = json.loads(path.read_text())
    assert (last["status"], last["attempts"]) == ("ok", 2)


@pytest.mark.soak
def test_twenty_kills_each_followed_by_one_command(cluster: Cluster) -> None:
    """At moments spread over the time that the first, undisturbed run took."""
    draw = random.Random(20)
    make_slow(cluster.path, CELLS, seconds=1.0)
    start = time.monotonic()
    first = cluster.submit(TARGET, *HERE)
    assert first.returncode == 0, first.stdout
    whole = time.monotonic() - start
    for number in range(20):
        make_slow(cluster.path, CELLS, seconds=1.01 + 0.01 * number)  # other code: due again
        before = len(finished(cluster.path))
        moment = draw.uniform(0.05, 1.0) * whole
        kept = kill_at(cluster, moment)
        alive = len(cluster.jobs())
        done = resume(cluster)
        sys.stdout.write(
            f"kill {number + 1} after {moment:.1f} of {whole:.1f} s: {len(kept) - before} of "
            f"{CELLS} cells finished by then, {alive} jobs alive\n"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert set(calls(cluster.path).values()) == {1}, f"kill {number + 1}"
        assert sum(calls(cluster.path).values()) == CELLS, f"kill {number + 1}"
        now = finished(cluster.path)
        assert {name: now[name] for name in kept} == kept, f"kill {number + 1}"
        assert len(now) == before + CELLS, f"kill {number + 1}"
        assert not leftovers(cluster.path)
