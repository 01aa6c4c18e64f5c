"""runs_more.csv and offloaded_states.csv: every row is read, or refused by name."""

import csv
import math
from collections import Counter

from rematbench.plugins.discover import discover
from rematbench.published.rows import RowError, read_case
from rematbench.spec.paths import data_dir


def rows(name: str) -> list[dict[str, str]]:
    with (data_dir("published") / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_more_runs_are_read_with_the_columns_of_runs() -> None:
    more = rows("runs_more.csv")
    assert list(more[0]) == list(rows("runs.csv")[0])
    assert len(more) == 736
    registry = discover(())
    refused: Counter[str] = Counter()
    for row in more:
        assert float(row["tokens_per_s_per_gpu"]) > 0
        try:
            case = read_case(row, registry)
        except RowError as error:
            refused[str(error)] += 1
        else:
            assert case.layout.gpus == int(row["gpus"])
    assert refused.total() <= 1
    assert all("trl" in reason for reason in refused)


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
