"""The engine as the step model of the fit, and refits that never see a source."""

import math
from typing import Any

import pytest

from rematbench.evidence.accuracy import left_out_errors, load_accuracy
from rematbench.evidence.calibrate import StepModel, _lowered, _seconds, sources, without_source
from rematbench.evidence.fit import PRIORS, fit_rows, with_values
from rematbench.evidence.job_evidence import (
    REFITTED,
    SHEETS,
    joined,
    line_of,
    log_error,
    out_of_source,
)
from rematbench.evidence.predict import predict_rows
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import SPEED, read_sheet
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.load import calibration
from rematbench.inputs.paths import data_dir
from tests.problems import all_methods

ROWS = read_sheet(data_dir("published") / "runs.csv")


def fitted(source: str) -> list[Any]:
    return [row for row in fit_rows(ROWS, calibration().fit) if source in row["source"]]


@pytest.mark.parametrize("source", ["Yuan", "Korthikanti", "Fujii", "MosaicML"])
def test_the_step_model_predicts_what_predict_does(source: str) -> None:
    row = fitted(source)[-1]
    whole = predict_rows([row], processes=1)[0]["pred_step_s"]
    lowered = _lowered(read_case(row, all_methods()), calibration())
    assert _seconds(lowered, calibration()) == pytest.approx(whole, rel=1e-9)


def test_a_long_step_is_computed_from_two_short_ones() -> None:
    row = fitted("Fujii")[0]
    lowered = _lowered(read_case(row, all_methods()), calibration())
    assert len(lowered.parts) == 2
    assert lowered.beyond > 0


def test_trials_come_back_in_order() -> None:
    start = calibration()
    slow = with_values(start, ["gpus.ampere.gemm_efficiency"], [0.4])
    one, other = fitted("Korthikanti")[:2]
    with StepModel(start, processes=1) as model:
        found = model([(one, start), (other, start), (one, slow), (other, slow)])
    whole = [
        row["pred_step_s"]
        for constants in (None, slow)
        for row in predict_rows([one, other], processes=1, constants=constants)
    ]
    assert found == pytest.approx(whole, rel=1e-9)
    assert found[2] > 1.2 * found[0]
    assert found[3] > 1.2 * found[1]


def test_what_only_the_lost_source_informed_is_back_at_its_prior() -> None:
    start = calibration()
    left = without_source(start, ROWS, "Fujii")
    assert left.networks["h100-94gb-tsubame4"].nic_efficiency == PRIORS["nic_efficiency"].centre
    assert left.networks["h800-80gb"] == start.networks["h800-80gb"]
    assert left.gpus == start.gpus
    assert not [rule for rule in left.fit if "Fujii" in rule.source]
    assert len(left.fit) < len(start.fit)


def test_every_group_of_speeds_in_a_sheet_of_steps_has_a_left_out_error() -> None:
    groups = [group for group in load_accuracy().groups if group.metric == SPEED]
    names = {group.name for group in groups if group.sheet in SHEETS}
    assert set(left_out_errors(out_of_source(), load_accuracy(), calibration())) == names
    assert len(names) < len(groups)  # steps with experts have a sheet of their own
    assert "" not in sources(load_accuracy())  # a refit without it would leave every row out


def test_a_line_is_of_the_row_that_was_predicted() -> None:
    rows = [dict(ROWS[0], status="oom"), dict(ROWS[1])]
    made = [{**row, "pred_tokens_per_s_per_gpu": "3000"} for row in rows]
    found = [line_of("runs.csv", i, rows[i], made[i], REFITTED) for i in range(2)]
    assert found[0] == {}  # what ran out of memory has no error
    line = found[1]
    assert joined(line, {"runs.csv": rows})["model"] == rows[1]["model"]
    assert log_error(joined(line, {"runs.csv": rows})) == pytest.approx(
        math.log(3000 / float(rows[1]["tokens_per_s_per_gpu"]))
    )
    with pytest.raises(ConfigError, match="row 2: the prediction is for another row"):
        joined(line, {"runs.csv": rows[::-1]})


def test_every_fitted_source_is_refitted_without_and_no_other() -> None:
    """A row of a sheet with FIT rows is out of source only after a refit without its source."""
    declared = [rule.source for rule in calibration().fit]
    for row in out_of_source():
        if log_error(row) is None:
            continue  # a peak alone, to which no constant is fitted
        fitted_to = any(source in row["source"] for source in declared)
        assert fitted_to == (row["constants"] == REFITTED) or row["sheet"] == "runs_more.csv"
