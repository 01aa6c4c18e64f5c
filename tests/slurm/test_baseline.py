"""A baseline's cells as Slurm jobs: on one node, and over two by srun and torchrun."""

import csv
import json

import pytest

from tests.installed import needs
from tests.slurm.conftest import Cluster

needs("megatron.core")

pytestmark = [pytest.mark.slurm, pytest.mark.soak]

SUITE = """
steps: 2
cell_minutes: 5
methods: [megatron_core]
problems:
{problems}
"""
PROBLEM = """
  - name: {name}
    why: tests
    model: tiny-llama
    cluster: this-machine
    system: rematbench
    gpus: {gpus}
    seq_len: 64
    global_batch: 4
    tp: 2
    precision: fp32
"""


def test_a_package_over_two_nodes_trains_as_on_one(cluster: Cluster) -> None:
    shapes = {"one-node": 2, "two-nodes": 4}
    problems = "".join(PROBLEM.format(name=name, gpus=gpus) for name, gpus in shapes.items())
    (cluster.path / "config/measure.yaml").write_text(SUITE.format(problems=problems))
    done = cluster.submit("measure")
    assert done.returncode == 0, done.stdout
    with (cluster.path / "results/measure/executed.csv").open(newline="") as file:
        one, two = csv.DictReader(file)
    assert [row["status"] for row in (one, two)] == ["ok", "ok"], (one["reason"], two["reason"])
    assert (one["nodes"], two["nodes"]) == ("1", "2")
    assert len(two["hosts"].split()) == 2
    assert json.loads(two["losses"]) == pytest.approx(json.loads(one["losses"]), rel=1e-5)
    assert one["engine"] == two["engine"]
    assert one["engine"].startswith("megatron-core ")
