"""The targets of the workflow through a real Slurm: simulated bundles, executed cells."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rematbench.evidence.published.sheets import read_sheet
from tests.worlds.slurm.conftest import Cluster
from tests.worlds.slurm.fragile import write_suite
from tests.worlds.slurm.slow import leave_methods

pytestmark = pytest.mark.slurm


def executed(folder: Path) -> dict[str, dict[str, Any]]:
    """Cell records of a store: the problem's name and how it was told to fail."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {
        f"{r['cell']['spec']['name']} {r['cell']['variant']['settings'].get('how', '')}".strip(): r
        for r in found
    }


def measured(record: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on where a cell ran."""
    elsewhere = ("provenance",)
    return {key: value for key, value in record["record"].items() if key not in elsewhere}


CALL_OUT = "import socket; socket.create_connection(('192.0.2.7', 53), timeout=5)"


def test_nodes_have_no_network(cluster: Cluster) -> None:
    """So everything here shows that they need none."""
    if not cluster.slurm.enter:
        pytest.skip("no network namespace could be made here")
    tried = cluster.tool("srun", sys.executable, "-c", CALL_OUT)
    assert "Network is unreachable" in tried.stderr


@pytest.mark.full
def test_the_smoke_suite_runs_as_jobs(cluster: Cluster) -> None:
    """With two methods and their composition, to be quick: all that its figures need."""
    leave_methods(cluster.path, {"balanced_checkpointing", "pp_offload"})
    done = cluster.submit("smoke", "--config", "simulate_on=slurm")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("has been submitted with SLURM jobid") == 3
    table = (cluster.path / "results/smoke/tables/methods.md").read_text()
    assert "| pp_offload " in table
    assert (cluster.path / "results/smoke/figures/timeline.pdf").stat().st_size
    again = cluster.submit("smoke", "--config", "simulate_on=slurm", "--dry-run")
    assert "Nothing to be done" in again.stdout, again.stdout


@pytest.fixture(scope="module")
def executed_there(cluster: Cluster) -> str:
    """What Snakemake said of executed cells: over two nodes, and on one where some fail."""
    write_suite(cluster.path, {"one-node": 1, "two-nodes": 2}, ["raises", "killed"])
    site = cluster.path / "config/clusters/this-machine.yaml"
    asks = "  gres: gpu\n  mem_mb_per_node: 1500\n"
    site.write_text(site.read_text().replace("  nodes: 2\n", f"  nodes: 2\n{asks}"))
    done = cluster.submit("measure")
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.full
def test_a_cell_over_two_nodes_equals_the_local_one(cluster: Cluster, executed_there: str) -> None:
    jobs = re.findall(r"with SLURM jobid (\d+)", executed_there)
    shown = [cluster.slurm.ask("scontrol", "show", "job", job) for job in jobs]
    assert sorted(re.search(r"NumNodes=(\d)", text)[1] for text in shown) == ["1", "2"]  # type: ignore[index]
    assert all("gres:gpu:2" in text or "gres/gpu=" in text for text in shown), shown
    there = executed(cluster.path / "results/measure/cells")["two-nodes"]
    assert there["status"] == "ok"
    assert there["job_id"] in jobs

    here = cluster.tool(
        *("rematbench", "run-cells", "config/measure.yaml", "--store", "local"),
        *("--bundle", "fragile.2x2.0", "-o", "local.json"),
    )
    assert here.returncode == 0, here.stderr
    local = executed(cluster.path / "local")["two-nodes"]
    assert measured(local) == measured(there)


@pytest.mark.full
def test_failing_cells_are_rows_and_stop_no_other(cluster: Cluster, executed_there: str) -> None:
    """Rank 1 fails and rank 0 sees a connection break: the row names the cause."""
    assert "Error in rule" not in executed_there
    rows = read_sheet(cluster.path / "results/measure/executed.csv")
    assert [row["status"] for row in rows] == ["ok", "failed", "oom", "ok"]
    reasons = [row["reason"] for row in rows]
    assert "a fragile rank broke" in reasons[1]
    assert "signal 9" in reasons[2]


@pytest.mark.full
def test_the_report_is_one_file_that_loads_nothing(cluster: Cluster, executed_there: str) -> None:
    assert executed_there
    report = cluster.submit("measure", "--report", "report.html")
    assert report.returncode == 0, report.stdout
    html = (cluster.path / "report.html").read_text()
    assert "executed.csv" in html
    loads = r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)\s*=\s*["'](?!data:|#)[^"']+"""
    assert not re.findall(loads, html)
