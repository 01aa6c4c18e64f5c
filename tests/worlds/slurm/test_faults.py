"""A drained node, a killed node daemon, the controller away; requests that cannot be."""

import signal
import time

import pytest

from tests.worlds.slurm.conftest import FAST, Cluster
from tests.worlds.slurm.fragile import write_suite
from tests.worlds.slurm.slow import HERE, TARGET, calls, leftovers, make_slow, rows

pytestmark = pytest.mark.slurm

CELLS = 12

SITE = """
slurm:
  source: tests
  partition: {partition}
  gres: {gres}
  nodes: 9
  minutes: 60
  mem_mb_per_node: {mem_mb}
  cpus_per_node: 2
  canary_s: 0
"""
REFUSED = [
    ("nowhere", "gpu", 100, "Slurm has no partition nowhere (known: main, urgent)"),
    ("main", "gpu:h800", 100, "needs 1 nodes with 2 gpu:h800; partition main has 0 such of 2"),
    ("main", "gpu", 9000, "9000 MB of memory; partition main has 0 such of 2"),
]


def write_site(cluster: Cluster, partition: str, gres: str, mem_mb: int) -> None:
    text = (cluster.path / "config/clusters/this-machine.yaml").read_text()
    text = text[: text.index("slurm:")].rpartition("#")[0]
    section = SITE.format(partition=partition, gres=gres, mem_mb=mem_mb)
    (cluster.path / "site.yaml").write_text(text + section)


def test_what_cannot_be_fails_at_once_with_one_line(cluster: Cluster) -> None:
    for partition, gres, mem_mb, words in REFUSED:
        write_site(cluster, partition, gres, mem_mb)
        done = cluster.tool(
            *("rematbench", "submit-plan", "config/measure.yaml", "--store", "none"),
            *("--cluster", "site.yaml"),
        )
        assert done.returncode == 2, done.stdout
        assert len(done.stderr.splitlines()) == 1
        assert words in done.stderr
    write_site(cluster, "main", "gpu", 100)
    dear = cluster.submit(
        *("measure", "--config", "cluster=site.yaml", "max_gpu_hours=0.01", "ask_slurm=true")
    )
    assert dear.returncode != 0
    assert "predicted GPU-hours exceed max_gpu_hours 0.01" in dear.stdout
    assert "has been submitted" not in dear.stdout
    assert not cluster.jobs()


def finish(cluster: Cluster, run: "object") -> None:
    """A run that was disturbed comes to its end by itself or by the documented command."""
    text, _ = run.communicate()  # type: ignore[attr-defined]
    if run.returncode != 0:  # type: ignore[attr-defined]
        again = cluster.tool("rematbench", "resume", "--", TARGET, *HERE, *FAST)
        assert again.returncode == 0, text + again.stdout
    assert {record["status"] for record in rows(cluster.path)} == {"ok"}
    assert not leftovers(cluster.path)


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
    assert set(calls(cluster.path).values()) == {1}


@pytest.mark.soak
def test_the_controller_away_for_a_minute(cluster: Cluster) -> None:
    make_slow(cluster.path, CELLS, seconds=3.0)
    run = cluster.begin(TARGET, *HERE)
    cluster.until(lambda: calls(cluster.path), "a first finished cell")
    cluster.slurm.end("slurmctld", signal.SIGKILL)
    time.sleep(60)
    cluster.slurm.start_controller()
    finish(cluster, run)
    assert set(calls(cluster.path).values()) == {1}


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
