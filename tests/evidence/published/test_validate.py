"""Accuracy on published cells: nothing may be worse than config/accuracy.yaml accepts."""

from functools import cache
from typing import get_args

import pytest

from rematbench.evidence.accuracy import Report, Sheet, load_accuracy, validate
from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.load import calibration
from rematbench.inputs.paths import data_dir
from tests.predicted import predicted, published

ACCURACY = load_accuracy()
PROMISES = [(group.name, name) for group in ACCURACY.groups for name in group.promises]
pytestmark = pytest.mark.full  # a minute of CPU; test_peaks.py predicts 31 of the cells


@cache
def report() -> Report:
    """The rows of all scored sheets."""
    rows = [row for name in get_args(Sheet) for row in predicted(published(name))]
    return validate(rows, calibration(), ACCURACY)


@pytest.mark.parametrize(("group", "statistic"), PROMISES)
def test_no_error_is_worse_than_accepted(group: str, statistic: str) -> None:
    checks = [check for each in report().groups for check in each.checks]
    (check,) = (c for c in checks if (c.group, c.statistic) == (group, statistic))
    assert check.status != "FAIL", f"reached {check.value}, accepted {check.accepted}"


def test_every_speed_beats_a_constant_mfu() -> None:
    behind = {
        each.name: (each.mean, each.floor)
        for each in report().groups
        if each.mean is not None and each.floor is not None and each.mean >= each.floor
    }
    assert not behind


def test_every_comparable_cell_is_predicted() -> None:
    assert {each.name: each.missing for each in report().groups if each.missing} == {}


def test_few_cells_are_tight() -> None:
    verdicts = report().verdicts
    assert 0 < verdicts.tight <= 0.15 * verdicts.cells


def test_verdicts_beat_always_fits() -> None:
    verdicts = report().verdicts
    assert verdicts.right > verdicts.always_fits


def test_reported_verdicts_are_the_committed_ones() -> None:
    """Not promised, and yet a change of a verdict is seen."""
    checks = [check for each in report().groups for check in each.checks]
    ours = {(c.group, c.statistic): c.value for c in checks if c.status == "reported"}
    lines = read_sheet(data_dir("config").parent / "results/expected/promises.csv")
    told = [line for line in lines if line["status"] == "reported"]
    assert ours == {(line["group"], line["statistic"]): float(line["value"]) for line in told}
