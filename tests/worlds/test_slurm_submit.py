"""What is refused before anything is submitted, with one line."""

from pathlib import Path
from typing import Any

import pytest

from rematbench.host.console import CommandError
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.queue import UNLIMITED, Node, minutes
from rematbench.worlds.slurm.requests import check_request, executed_request, simulated_request
from rematbench.worlds.slurm.settings import load_center
from rematbench.worlds.slurm.submissions import refuse, submissions
from tests.campaigns import campaign, center_file, node


def test_a_budget_refuses_and_names_the_largest(tmp_path: Path) -> None:
    path = center_file(tmp_path, gres="gpu", nodes=4)
    made = campaign(tmp_path, path)
    rows = submissions(made, Store(tmp_path / "store"))
    assert [row.gpus for row in rows] == [2, 2]
    assert all(0 < row.gpu_hours < row.most_gpu_hours for row in rows)
    with pytest.raises(CommandError, match=r"exceed max_gpu_hours 0\.01"):
        refuse(made, rows, max_gpu_hours=0.01, ask_slurm=False)
    refuse(made, rows, max_gpu_hours=10.0, ask_slurm=False)


def test_more_nodes_than_the_center_has_are_refused(tmp_path: Path) -> None:
    made = campaign(tmp_path, center_file(tmp_path, nodes=2), gpus=8)
    rows = submissions(made, Store(tmp_path / "store"))
    with pytest.raises(CommandError, match=r"needs 4 nodes; .* allows 2"):
        refuse(made, rows, max_gpu_hours=0.0, ask_slurm=False)


EXECUTED = [
    ({"partition": "p"}, node(), "no partition p (known: main)"),
    ({}, node(up=False), "it is not up"),
    ({}, node(minutes=5), "allows 5"),
    ({"gres": "gpu:h800"}, node(), "gpu:h800; the default partition has 0 such of 1"),
    ({"mem_mb_per_node": 5000}, node(), "5000 MB of memory"),
    ({"cpus_per_node": 9}, node(), "9 CPUs"),
    ({"gres": "gpu"}, node(gres="gpu:1"), "2 gpu;"),
]
NO_CPU = "slurm: cpu_partition: Slurm has no partition cpu (known: main)"
SIMULATED = [
    ({"cpu_partition": "cpu"}, node(), NO_CPU),
    ({"partition": "p"}, node(), "slurm: partition: Slurm has no partition p (known: main)"),
    ({"cpu_partition": "main"}, node(up=False), "partition main takes no jobs now"),
    ({"cpu_partition": "main"}, node(minutes=30), "asks for 60 minutes; partition main allow"),
    ({}, node(mem_mb=500), "2000 MB of memory; the default partition has 0 such of 1"),
]


@pytest.mark.parametrize(
    ("slurm", "other", "words", "executed"),
    [*((*case, True) for case in EXECUTED), *((*case, False) for case in SIMULATED)],
)
def test_what_no_node_holds_is_refused(
    tmp_path: Path, slurm: dict[str, Any], other: Node, words: str, executed: bool
) -> None:
    made = campaign(tmp_path, center_file(tmp_path, **slurm))
    bundle = next(iter(made.bundles.values()))
    asked = executed_request(made.center, bundle) if executed else simulated_request(made.center)
    with pytest.raises(CommandError) as error:
        check_request(asked, [other])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_what_a_node_holds_passes(tmp_path: Path) -> None:
    made = campaign(tmp_path, center_file(tmp_path, gres="gpu", cpus_per_node=8))
    for gres in ("gpu:2", "gpu:h800:2(S:0-1)", "nic:1,gpu:a:1,gpu:b:1"):
        request = executed_request(made.center, next(iter(made.bundles.values())))
        check_request(request, [node(gres=gres)])


def test_simulated_jobs_need_no_gpu_and_may_have_a_partition_of_their_own(tmp_path: Path) -> None:
    center = load_center(center_file(tmp_path, cpu_partition="cpu", partition="p", gres="gpu:h800"))
    check_request(simulated_request(center), [node(), node(partition="cpu", gres="(null)")])


@pytest.mark.parametrize(
    ("text", "value"),
    [("infinite", UNLIMITED), ("1-00:00:00", 1440), ("2-3", 3060), ("12:00", 12), ("1:30:00", 90)],
)
def test_time_limits(text: str, value: int) -> None:
    assert minutes(text) == value
