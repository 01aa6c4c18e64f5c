"""Figure 9 of ATC 2024: the paper's estimator gives every published alpha (an identity, not a
prediction: the estimator is derived from these cells)."""

import pytest

from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.paths import data_dir
from tests.problems import all_methods, plan_of

SHEET = read_sheet(data_dir("published") / "runs.csv")
ROWS = [row for row in SHEET if row["table"] == "Figure 9"]
BASE = {"none": "keep_all", "balanced": "balanced_checkpointing"}


def test_there_are_25_cells() -> None:
    assert len(ROWS) == 25


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['model']}-{r['gpus']}")
def test_fit_paper_gives_the_published_alpha(row: dict[str, str]) -> None:
    given = read_case(row, all_methods()).problem()
    plan = plan_of(given, f"{BASE[row['recompute']]}+pp_offload", fit="paper")
    assert plan.fit["bound"] == "paper estimate"
    assert plan.fit["alpha"] == pytest.approx(float(row["offload_fraction"]), abs=0.001)
