"""What is refused before anything is submitted, with one line."""

from pathlib import Path
from typing import Any

import pytest

from rematbench.host.console import CommandError
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.settings import load_center
from rematbench.worlds.slurm.submissions import STARTUP_S, gpu_hours, refuse
from tests.campaigns import campaign, center_file


def test_gpu_hours_over_the_limit_are_refused_and_the_largest_named(tmp_path: Path) -> None:
    made = campaign(tmp_path, center_file(tmp_path, gres="gpu", nodes=4))
    store = Store(tmp_path / "store")
    hours = {n: gpu_hours(made, bundle, bundle.cells) for n, bundle in made.bundles.items()}
    assert all(2 * STARTUP_S / 3600 < of_one < 0.1 for of_one in hours.values())
    largest = max(hours, key=lambda name: hours[name])
    text = rf"exceed max_gpu_hours 0\.01 \(2 submissions, the largest {largest} with"
    with pytest.raises(CommandError, match=text):
        refuse(made, store, max_gpu_hours=0.01)
    refuse(made, store, max_gpu_hours=10.0)
    refuse(made, store)


def test_gpu_hours_count_gpus_that_the_job_holds(tmp_path: Path) -> None:
    def hours(**slurm: Any) -> float:
        made = campaign(tmp_path, center_file(tmp_path, **slurm))
        bundle = next(iter(made.bundles.values()))
        return gpu_hours(made, bundle, bundle.cells)

    whole = load_center("this-machine").cluster.gpus_per_node
    shared = hours(gres="gpu")
    assert hours() == 0.0
    assert hours(gres="gpu", extra="--exclusive") == pytest.approx(shared * whole / 2)


def test_more_nodes_than_the_center_has_are_refused(tmp_path: Path) -> None:
    made = campaign(tmp_path, center_file(tmp_path, nodes=2), gpus=8)
    with pytest.raises(CommandError, match=r"needs 4 nodes, but .* allows 2"):
        refuse(made, Store(tmp_path / "store"))
