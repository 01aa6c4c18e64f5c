"""Small models on one node, where the host sets the pace: published rows and their figure."""

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rematbench.cli.sheet import predict
from rematbench.evidence.accuracy import MORE, Accuracy, Group, load_accuracy, members, validate
from rematbench.evidence.predict import predict_rows
from rematbench.evidence.published.sheets import Row, read_sheet
from rematbench.host.table import write_sheet
from rematbench.inputs.constants import instant_hosts, is_fit
from rematbench.inputs.load import calibration
from rematbench.inputs.paths import data_dir
from tests.predicted import predicted, published

GROUPS = [
    group
    for group in load_accuracy().groups
    if group.sheet == MORE and "vTrain" in group.rule.source
]
MOST = 0.10
"""The promised mean error of both groups: all rows, and TP 8 alone."""


def small() -> list[dict[str, Any]]:
    """Two depths on the fewest GPUs, one global batch."""
    return [
        row
        for row in published(MORE)
        if "vTrain" in row["source"]
        and row["layers"] in ("12", "24")
        and row["global_batch"] == "16"
    ]


def mean_error(rows: Sequence[Row]) -> float:
    key = "tokens_per_s_per_gpu"
    return statistics.fmean(abs(float(row[f"pred_{key}"]) / float(row[key]) - 1) for row in rows)


@pytest.mark.full  # as the promises of test_validate.py
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_all_rows_keep_the_promise(group: Group) -> None:
    """No row is left out but those that a constant was fitted to."""
    shipped = calibration()
    every = predicted(published(MORE))
    rows = members(group, every)
    assert {row["hidden"] for row in rows} == {"2048"}
    assert len(rows) == {True: 40, False: 720}[bool(group.rule.tp)]
    assert group.promises["mean"].accepted <= MOST
    error = mean_error([row for row in rows if not is_fit(row, shipped.fit)])
    assert error <= MOST
    (report,) = validate(every, shipped, Accuracy(groups=(group,))).groups
    assert report.mean == pytest.approx(error)
    assert report.status == "met"


@pytest.mark.parametrize("widest", [False, True])
def test_without_a_host_errors_are_larger(widest: bool) -> None:
    shipped = calibration()
    rows = [row for row in small() if (row["tp"] == "8") is widest and not is_fit(row, shipped.fit)]
    assert len(rows) >= 6
    instant = predict_rows(rows, processes=1, constants=instant_hosts(shipped))
    assert mean_error(predicted(rows)) < 0.7 * mean_error(instant)


def test_the_figure_shows_how_long_devices_wait(tmp_path: Path) -> None:
    sheet, names = tmp_path / "rows.csv", ("predicted.csv", "instant.csv")
    rows = [row for row in small() if row["pp"] == "1" and row["layers"] == "24"]
    write_sheet(sheet, rows, list(rows[0]))
    for name, instant in zip(names, (False, True), strict=True):
        predict(sheet, tmp_path / name, processes=1, instant_hosts=instant)
    slow, fast = (read_sheet(tmp_path / name) for name in names)
    for one, other in zip(slow, fast, strict=True):
        assert float(one["pred_step_s"]) >= float(other["pred_step_s"])
    script = data_dir("config").parent / "figures" / "small_models.py"
    inputs = [str(tmp_path / name) for name in names]
    target = tmp_path / "small_models.pdf"
    command = [sys.executable, str(script), *inputs, str(target)]
    subprocess.run(command, check=True, env={**os.environ, "MPLCONFIGDIR": str(tmp_path)})
    assert target.stat().st_size > 1000
    assert target.with_suffix(".png").stat().st_size > 1000
