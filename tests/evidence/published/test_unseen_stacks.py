"""Rows that no whole-step constant was fitted to: their stacks are facts alone."""

from statistics import fmean

from rematbench.evidence.accuracy import MORE
from rematbench.evidence.published.sheets import Cell
from rematbench.inputs.load import calibration
from tests.predicted import predicted_of

NEMO = "dgxc-benchmarking"
LONG = ("128K", "1M")


def error(row: Cell) -> float:
    return float(row["pred_tokens_per_s_per_gpu"]) / float(row["tokens_per_s_per_gpu"]) - 1.0


def test_nemo_rows_are_within_five_percent_on_average_and_all_fit() -> None:
    rows = predicted_of(MORE, lambda row: NEMO in row["source"])
    assert len(rows) == 14
    assert {row["pred_status"] for row in rows} == {"ok"}
    assert {row["pred_attention"] for row in rows} == {"cudnn"}
    assert fmean(abs(error(row)) for row in rows) <= 0.05


def test_no_row_of_theirs_is_fitted() -> None:
    fitted = calibration().fitted
    assert not [name for name in fitted if "nemo" in name or "trl" in name or "ulysses" in name]
    assert not [rule for rule in calibration().fit if NEMO in rule.source]


def test_long_rows_are_predicted_by_their_kernels() -> None:
    rows = {row["table"]: row for row in predicted_of(MORE, lambda row: row["table"] in LONG)}
    assert {name: row["pred_attention"] for name, row in rows.items()} == {
        "128K": "fa3",
        "1M": "cudnn",
    }
    for row in rows.values():
        assert row["pred_status"] == "ok"
        assert int(row["pred_peak_host_bytes"]) > 0  # layer inputs, as both notes say
        assert abs(error(row)) <= 0.15
