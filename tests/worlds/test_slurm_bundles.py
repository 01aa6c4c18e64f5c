"""Cells, what identifies each, their bundles and the resources of a bundle; what is refused before
anything is submitted, with one line."""

from pathlib import Path
from typing import Any

import pytest

from rematbench.host.console import CommandError
from rematbench.inputs.configfile import ConfigError
from rematbench.plugins.discover import discover
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.campaign import STARTUP_S, Bundle, Campaign, gpu_hours, refuse
from rematbench.worlds.slurm.launch import torchrun
from rematbench.worlds.slurm.settings import Center, load_center
from tests.campaigns import ROOT, campaign, center_file


def test_a_new_method_moves_no_cell_of_another(tmp_path: Path) -> None:
    few = campaign(tmp_path).bundles
    more = campaign(tmp_path, methods=["full_recompute", "selective_recompute", "keep_all"]).bundles
    assert {name: more[name] for name in few} == few


def test_an_edited_method_changes_the_keys_of_its_own_cells(tmp_path: Path) -> None:
    folder = tmp_path / "methods"
    folder.mkdir()
    text = (ROOT / "methods/keep_all.py").read_text()
    for name in ("first", "second"):
        (folder / f"{name}.py").write_text(text.replace('"keep_all"', f'"{name}"'))

    def keys() -> dict[str, str]:
        base = campaign(tmp_path, methods=["first", "second", "first+second"])
        made = Campaign(base.suite, discover([folder]))
        return {cell.variant.method: made.key(cell) for cell in made.cells}

    before = keys()
    with (folder / "second.py").open("a") as file:
        file.write("# edited\n")
    after = keys()
    assert {name for name in after if after[name] != before[name]} == {"second", "first+second"}


def test_a_bundle_holds_what_the_time_limit_holds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exceed the 60 minutes"):
        _ = campaign(tmp_path, cell_minutes=90).bundles
    assert campaign(tmp_path, cell_minutes=50).bundles["keep_all.1x2.0"].minutes == 55


def resources(center: Center, bundle: Bundle) -> dict[str, int | str | None]:
    return center.executed_resources(bundle.nodes, bundle.gpus_per_node, bundle.minutes)


def test_resources_of_one_and_of_several_nodes(tmp_path: Path) -> None:
    path = center_file(tmp_path, gres="gpu", partition="p", nodes=4, cpus_per_node=2)
    one = campaign(tmp_path, path, gpus=2)
    (alone, *_) = (resources(one.center, bundle) for bundle in one.bundles.values())
    assert (alone["gres"], alone["nodes"], alone["mpi"], alone["tasks"]) == ("gpu:2", 1, None, None)
    assert alone["qos"] is None
    assert alone["slurm_partition"] == "p"
    assert alone["slurm_account"] is None
    (owned,) = {
        resources(load_center("h800-80gb"), b)["slurm_account"] for b in one.bundles.values()
    }
    assert owned == "my-project"
    two = campaign(tmp_path, path, gpus=4)
    (both, *_) = (resources(two.center, bundle) for bundle in two.bundles.values())
    assert (both["nodes"], both["tasks"], both["mpi"]) == (2, 2, "srun")
    assert both["tasks_per_gpu"] == 0, "or the executor passes --ntasks-per-gpu beside --ntasks"


def test_several_nodes_start_by_srun_in_node_order() -> None:
    command = torchrun(["module"], nodes=2, gpus_per_node=4, job_id="7")
    assert command[:3] == ["srun", "--nodes", "2"]
    assert '--node-rank="$SLURM_NODEID"' in command[-1]
    local = torchrun(["module"], nodes=2, gpus_per_node=4, job_id="")
    assert "--nproc-per-node=8" in local


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
