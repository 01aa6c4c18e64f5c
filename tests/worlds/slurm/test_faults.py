"""A drained node, a killed node daemon, the controller away; too many GPU-hours."""

import signal
import subprocess
import time

import pytest

from tests.worlds.slurm.conftest import Cluster, kill_session
from tests.worlds.slurm.fragile import write_suite
from tests.worlds.slurm.slow import HERE, TARGET, calls, check_whole, make_slow

pytestmark = pytest.mark.slurm

CELLS = 12


@pytest.mark.full  # without a Slurm: tests/workflow/test_measure.py
def test_too_many_gpu_hours_are_refused_before_a_submission(cluster: Cluster) -> None:
    site = cluster.path / "config/clusters/this-machine.yaml"
    text = site.read_text()
    site.write_text(text.replace("  nodes: 2\n", "  nodes: 2\n  gres: gpu\n"))
    refused = cluster.submit("measure", "--config", "max_gpu_hours=0.01")
    site.write_text(text)
    assert refused.returncode != 0
    assert "predicted GPU-hours exceed max_gpu_hours 0.01" in refused.stdout
    assert "has been submitted" not in refused.stdout
    assert not cluster.jobs()


def finish(cluster: Cluster, run: "subprocess.Popen[str]") -> None:
    """A run that was disturbed comes to its end by itself or by the documented command."""
    text, _ = run.communicate()
    if run.returncode != 0:
        again = cluster.resume(TARGET, *HERE)
        assert again.returncode == 0, text + again.stdout
    check_whole(cluster.path, CELLS)


@pytest.mark.soak
def test_a_drained_node_delays_and_stops_nothing(cluster: Cluster) -> None:
    make_slow(cluster.path, CELLS, seconds=1.0)
    for name in cluster.slurm.names:
        cluster.tool("scontrol", "update", f"nodename={name}", "state=drain", "reason=test")
    run = cluster.begin(TARGET, *HERE)
    cluster.until(lambda: any("PENDING" in job for job in cluster.jobs()), "pending jobs")
    time.sleep(5)
    assert not calls(cluster.path)
    for name in cluster.slurm.names:
        cluster.tool("scontrol", "update", f"nodename={name}", "state=resume")
    finish(cluster, run)
    assert set(calls(cluster.path).values()) == {1}


@pytest.mark.soak
def test_a_killed_node_daemon(cluster: Cluster) -> None:
    """Slurm gives the node up and requeues; the old processes may live on, beside the new ones."""
    make_slow(cluster.path, CELLS, seconds=2.0)
    run = cluster.begin(TARGET, *HERE)
    cluster.until(lambda: calls(cluster.path), "a first finished cell")
    busy = cluster.jobs("%N", "--states=RUNNING")[0].strip()
    cluster.slurm.end(f"slurmd-{busy}", signal.SIGKILL)
    time.sleep(40)
    cluster.slurm.start_node(busy)
    finish(cluster, run)


@pytest.mark.soak
def test_the_controller_away_for_a_minute(cluster: Cluster) -> None:
    make_slow(cluster.path, CELLS, seconds=3.0)
    run = cluster.begin(TARGET, *HERE)
    cluster.until(lambda: calls(cluster.path), "a first finished cell")
    cluster.slurm.end("slurmctld", signal.SIGKILL)
    time.sleep(60)
    cluster.slurm.start_controller()
    kill_session(run)  # without an answer, the executor may have forgotten its jobs
    again = cluster.resume(TARGET, *HERE)
    assert again.returncode == 0, again.stdout
    check_whole(cluster.path, CELLS)


@pytest.mark.soak
def test_a_hanging_cell_ends_at_its_limit(cluster: Cluster) -> None:
    """And one out of device memory before it, as torch says it."""
    write_suite(cluster.path, {"one-node": 1}, ["oom", "hangs"], minutes=1)
    done = cluster.submit("measure")
    assert done.returncode == 0, done.stdout
    table = (cluster.path / "results/measure/executed.csv").read_text().splitlines()
    assert len(table) == 4
    assert ",ok," in table[1]
    assert ",oom," in table[2]
    assert "tried to allocate 80 GiB" in table[2]
    assert ",timeout,no result within 60 s," in table[3]
