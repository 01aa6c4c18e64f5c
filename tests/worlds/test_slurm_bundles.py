"""Cells, what identifies each, their bundles and the resources of a bundle; what is refused before
anything is submitted, with one line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from rematbench.host.console import CommandError
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.load import load_cluster
from rematbench.plugins.discover import discover
from rematbench.worlds.records.measured import Measured
from rematbench.worlds.records.record import content_hash
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm import campaign_rows
from rematbench.worlds.slurm.campaign import STARTUP_S, Bundle, Campaign, gpu_hours, refuse
from rematbench.worlds.slurm.campaign_rows import REFERENCE_COLUMNS
from rematbench.worlds.slurm.launch import torchrun
from rematbench.worlds.slurm.settings import Center, load_center
from tests.campaigns import ROOT, campaign, center_file
from tests.tables import tables


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


# -- the `slurm:` section of a cluster file --------------------------------------------------------


@pytest.mark.parametrize("name", ["h800-80gb", "a100-80gb-roce400", "this-machine"])
def test_examples_load(name: str) -> None:
    assert load_center(name).slurm.nodes >= 2


def test_the_section_changes_no_prediction(tmp_path: Path) -> None:
    path = center_file(tmp_path, partition="other", nodes=7)
    assert content_hash(load_cluster(path)) == content_hash(load_cluster("this-machine"))


@pytest.mark.parametrize(("slurm", "words"), tables(__file__)["wrong_section"])
def test_a_wrong_section_is_one_line(tmp_path: Path, slurm: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"slurm") as error:
        load_center(center_file(tmp_path, **slurm))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_cluster_without_the_section_says_what_to_add() -> None:
    with pytest.raises(ConfigError, match="add `slurm:`"):
        load_center("h200-141gb")


def test_setup_lines_come_first_and_values_are_quoted(tmp_path: Path) -> None:
    text = load_center("h800-80gb").slurm.shell_setup()
    assert text.startswith("module load cuda/12.8 nccl && . /shared")
    assert "export NCCL_SOCKET_IFNAME=bond0 && " in text
    other = load_center(center_file(tmp_path, environment={"A": "b c"}))
    assert other.slurm.shell_setup() == "export A='b c' && "


def test_a_job_has_equally_many_ranks_on_each_node() -> None:
    center = load_center("h800-80gb")
    assert [center.nodes(gpus) for gpus in (4, 8, 16)] == [1, 1, 2]
    with pytest.raises(ConfigError, match="12 ranks do not fill whole nodes of 8 GPUs"):
        center.nodes(12)


# -- whether cells of a problem train alike, from made-up losses and norms -------------------------


OURS, MEGATRON = "rematbench 1.0", "megatron-core 0.16.1"
RAN = Measured(losses=(8.0, 7.0), gradient_norms=(2.0, 1.5))
PACKAGE = replace(RAN, losses=(8.008, 6.0))
BLANK = dict.fromkeys(REFERENCE_COLUMNS, "")


class CellRan(NamedTuple):
    """What of a cell's row decides, and its numbers."""

    problem: str
    method: str
    precision: str
    keeps_all: bool
    engine: str
    found: Measured


def alike(cells: Sequence[CellRan | None]) -> list[dict[str, Any]]:
    """The columns of every cell, of which some did not run."""
    waiting = {"problem": "one", "keeps_all": "", "engine": OURS}
    return campaign_rows.reference_columns(
        [cell._asdict() if cell else waiting for cell in cells],
        [cell.found if cell else None for cell in cells],
    )


BASE = CellRan("one", "keep_all", "bf16", True, OURS, RAN)


def test_first_steps_are_held_to_what_keeps_all_in_our_executor() -> None:
    package = CellRan("one", "megatron_core", "bf16", True, MEGATRON, PACKAGE)
    wrong = replace(RAN, gradient_norms=(2.04, 1.5))
    full = CellRan("one", "full_recompute", "bf16", False, OURS, wrong)
    found = alike([package, full, BASE, None])
    assert found[0]["against"] == "keep_all"
    assert abs(found[0]["first_loss_error"] - 1e-3) < 1e-12
    assert found[0]["first_norm_error"] == 0.0, "the second step's is not compared"
    assert found[0]["alike"] == "yes"
    assert abs(found[1]["first_norm_error"] - 0.02) < 1e-12
    assert found[1]["alike"] == "NO", "norm beyond the bound of bf16"
    assert found[2] == found[3] == BLANK


def test_the_bound_is_that_of_the_precision() -> None:
    base, package = (
        CellRan("one", name, "fp32", name == "keep_all", engine, found)
        for name, engine, found in (("keep_all", OURS, RAN), ("megatron_core", MEGATRON, PACKAGE))
    )
    assert alike([base, package])[1]["alike"] == "NO"


def test_without_our_executor_the_packages_own_is_the_reference() -> None:
    package = CellRan("one", "megatron_core", "bf16", True, MEGATRON, PACKAGE)
    tiled = CellRan("one", "deepspeed", "bf16", False, "deepspeed 0.19", PACKAGE)
    found = alike([tiled, package])
    assert found[0]["against"] == "megatron_core (megatron-core 0.16.1)"
    assert (found[0]["alike"], found[1]) == ("yes", BLANK)


def test_nothing_is_said_without_a_reference_or_without_numbers() -> None:
    other = CellRan("two", "keep_all", "bf16", True, OURS, RAN)
    full = CellRan("one", "full_recompute", "bf16", False, OURS, RAN)
    assert alike([other, full]) == [BLANK, BLANK], "another problem's is no reference"
    silent = full._replace(found=replace(RAN, losses=()))
    assert alike([BASE, silent])[1] == BLANK
    for wrong in ({"losses": (float("nan"),)}, {"gradient_norms": (float("nan"),)}):
        nan = full._replace(found=replace(RAN, **wrong))
        assert alike([BASE, nan])[1]["alike"] == "NO"
