"""The targets of the workflow through a real Slurm: simulated bundles, executed cells."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm

MEASURE = """
steps: 2
cell_minutes: 5
methods: [keep_all]
problems:
  - name: two-nodes
    why: the pipeline between two nodes, tensor parallelism inside each
    model: tiny-llama
    cluster: this-machine
    system: rematbench
    gpus: 4
    seq_len: 32
    global_batch: 2
    tp: 2
    pp: 2
    precision: fp32
"""
"""A cell over two nodes."""


def executed(folder: Path) -> dict[str, dict[str, Any]]:
    """Cell records of a store by cell."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {f"{r['cell']['spec']['name']}.{r['cell']['variant']['method']}": r for r in found}


def measured(record: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on where a cell ran."""
    elsewhere = ("provenance",)
    return {key: value for key, value in record["record"].items() if key not in elsewhere}


def test_the_smoke_suite_runs_as_jobs(cluster: Cluster) -> None:
    done = cluster.submit("smoke", "--config", "simulate_on=slurm")
    assert done.returncode == 0, done.stdout
    assert "has been submitted with SLURM jobid" in done.stdout
    table = (cluster.path / "results/smoke/tables/methods.md").read_text()
    assert "| full_recompute " in table
    again = cluster.submit("smoke", "--config", "simulate_on=slurm", "--dry-run")
    assert "Nothing to be done" in again.stdout, again.stdout


def test_a_cell_over_two_nodes_equals_the_local_one(cluster: Cluster) -> None:
    (cluster.path / "config/measure.yaml").write_text(MEASURE)
    site = cluster.path / "config/clusters/this-machine.yaml"
    asks = "  gres: gpu\n  mem_mb_per_node: 1500\n"
    site.write_text(site.read_text().replace("  nodes: 2\n", f"  nodes: 2\n{asks}"))
    done = cluster.submit("measure")
    assert done.returncode == 0, done.stdout
    (job,) = re.findall(r"with SLURM jobid (\d+)", done.stdout)
    shown = cluster.slurm.ask("scontrol", "show", "job", job)
    assert "NumNodes=2" in shown
    assert "gres:gpu:2" in shown or "gres/gpu=4" in shown, shown
    store = cluster.path / "results/measure/cells"
    there = executed(store)["two-nodes.keep_all"]
    assert there["status"] == "ok"
    assert there["job_id"]
    assert len(there["hosts"]) == 2
    assert all(host["canary"] for host in there["hosts"])

    here = cluster.tool(
        *("rematbench", "run-cells", "config/measure.yaml", "--store", "local"),
        *("--bundle", "keep_all.2x2.0", "-o", "local.json"),
    )
    assert here.returncode == 0, here.stderr
    local = executed(cluster.path / "local")["two-nodes.keep_all"]
    assert measured(local) == measured(there)
    assert len(local["hosts"]) == 1

    report = cluster.submit("measure", "--report", "report.html")
    assert report.returncode == 0, report.stdout
    html = (cluster.path / "report.html").read_text()
    assert "executed.csv" in html
