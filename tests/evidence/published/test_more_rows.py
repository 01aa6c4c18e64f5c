"""runs_more.csv and offloaded_states.csv: every row is read, or refused by name."""

import math
from collections import Counter

import pytest

from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import RowError, read_sheet
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.load import load_cluster, names
from rematbench.inputs.paths import data_dir
from rematbench.plugins.discover import discover


def rows(name: str) -> list[dict[str, str]]:
    return read_sheet(data_dir("published") / name)


def test_more_runs_are_read_with_the_columns_of_runs() -> None:
    more = rows("runs_more.csv")
    assert list(more[0]) == list(rows("runs.csv")[0])
    assert len(more) == 757
    registry = discover(())
    refused: Counter[str] = Counter()
    for row in more:
        assert row["tokens_per_s_per_gpu"] or row["peak_device_bytes"]
        try:
            case = read_case(row, registry)
        except RowError as error:
            refused[str(error)] += 1
        else:
            assert case.layout.gpus == int(row["gpus"])
    assert not refused


def test_offloaded_states_are_read() -> None:
    found = rows("offloaded_states.csv")
    assert len(found) == 108
    assert Counter(row["variant"] for row in found).keys() == {
        "deepspeed_blocking",
        "deepspeed_async",
        "dos",
    }
    for row in found:
        phases = [float(row[name]) for name in ("forward_s", "backward_s", "update_s")]
        assert all(phase > 0 for phase in phases)
        assert math.fsum(phases) < 1.01 * float(row["step_s"]) < 1.6 * math.fsum(phases)
        assert 0.0 <= float(row["host_ratio"]) <= 1.0
        assert int(row["gpus"]) == int(row["tp"]) * int(row["dp"])
        parameters = int(row["layers"]) * int(row["hidden"]) ** 2
        assert parameters < int(row["parameters"]) < 40 * parameters


UNBOUND = "polaris-a100-40gb"
"""Polaris nodes whose ranks share all cores: no file, because their rate of updates is not one."""


def test_rows_of_a_node_without_a_file_are_named() -> None:
    """results/published/SOURCES.md says what they are compared with."""
    found = rows("offloaded_states.csv")
    counts = Counter(row["cluster"] for row in found if row["cluster"] not in names("cluster"))
    assert counts == {UNBOUND: 66, "": 2}
    with pytest.raises(ConfigError, match=f"unknown cluster.*{UNBOUND}"):
        load_cluster(UNBOUND)
