"""The `slurm:` section of a cluster file."""

from pathlib import Path
from typing import Any

import pytest

from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.load import load_cluster
from rematbench.worlds.records.record import content_hash
from rematbench.worlds.slurm.settings import load_center
from tests.campaigns import center_file


@pytest.mark.parametrize("name", ["h800-80gb", "a100-80gb-roce400", "this-machine"])
def test_examples_load(name: str) -> None:
    assert load_center(name).slurm.nodes >= 2


def test_the_section_changes_no_prediction(tmp_path: Path) -> None:
    path = center_file(tmp_path, partition="other", nodes=7)
    assert content_hash(load_cluster(path)) == content_hash(load_cluster("this-machine"))


@pytest.mark.parametrize(
    ("slurm", "words"),
    [
        ({"partitoin": "x"}, "did you mean 'partition'"),
        ({"gres": "gpu:2"}, "without a count"),
        ({"minutes": 0}, ">= 1"),
    ],
)
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
