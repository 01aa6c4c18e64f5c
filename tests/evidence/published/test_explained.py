"""What docs/accuracy.md says of published rows that no host's floor explains."""

from functools import cache
from statistics import fmean

import pytest

from rematbench.evidence.accuracy import MORE
from rematbench.evidence.published.sheets import SPEED, read_sheet
from rematbench.inputs.paths import data_dir


@cache
def seconds_by_place() -> dict[tuple[str, str, str], list[float]]:
    """Seconds of a micro-batch and GPU of vTrain's rows at PP 1 and DP 1, by layers, TP, batch."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in read_sheet(data_dir("published") / MORE):
        if row["pp"] == row["dp"] == "1" and "vTrain" in row["source"]:
            place = (row["layers"], row["tp"], row["micro_batch"])
            tokens = int(row["micro_batch"]) * int(row["seq_len"])
            found.setdefault(place, []).append(tokens / float(row[SPEED]))
    return found


@pytest.mark.parametrize("layers", ["12", "16", "20", "24"])
def test_the_host_s_floor_does_not_explain_these_points(layers: str) -> None:
    """A floor is the same at every micro-batch, and at most what micro-batch 1 takes."""

    def more(tp: str, one: str, other: str) -> float:
        found = seconds_by_place()
        return fmean(found[layers, tp, other]) / fmean(found[layers, tp, one]) - 1

    assert -0.18 < more("8", "1", "2") < -0.16
    assert abs(more("8", "1", "4")) < 0.02
    assert -0.055 < more("4", "1", "2") < -0.03
    assert more("4", "2", "4") == pytest.approx(0.78, abs=0.01)
    assert more("2", "1", "2") == pytest.approx(0.36, abs=0.01)
