"""A baseline's cells as Slurm jobs: on one node, and over two by srun and torchrun."""

import json

import pytest

from rematbench.evidence.published.sheets import read_sheet
from tests.campaigns import suite_text, tiny
from tests.installed import needs
from tests.worlds.slurm.conftest import Cluster

needs("megatron.core")

pytestmark = [pytest.mark.slurm, pytest.mark.soak]

SIZES = {"seq_len": 64, "global_batch": 4, "tp": 2, "precision": "fp32"}


def test_a_package_over_two_nodes_trains_as_on_one(cluster: Cluster) -> None:
    problems = [tiny("one-node", gpus=2, **SIZES), tiny("two-nodes", gpus=4, **SIZES)]
    text = suite_text(problems, steps=2, cell_minutes=5, methods=["megatron_core"])
    (cluster.path / "config/measure.yaml").write_text(text)
    done = cluster.submit("measure")
    assert done.returncode == 0, done.stdout
    one, two = read_sheet(cluster.path / "results/measure/executed.csv")
    assert [row["status"] for row in (one, two)] == ["ok", "ok"], (one["reason"], two["reason"])
    assert (one["nodes"], two["nodes"]) == ("1", "2")
    assert json.loads(two["losses"]) == pytest.approx(json.loads(one["losses"]), rel=1e-5)
    assert one["engine"] == two["engine"]
    assert one["engine"].startswith("megatron-core ")
