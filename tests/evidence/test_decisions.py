"""Decisions: what a pick loses, how well layouts are ranked, and the chooser with one MFU."""

from typing import Any

import pytest

from rematbench.evidence.accuracy import MORE, Accuracy, validate
from rematbench.evidence.decisions import (
    constant_mfu_regret,
    decisions,
    formula_share,
    rank_correlation,
    regret,
    summary,
    sweeps,
)
from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.load import calibration
from rematbench.inputs.paths import data_dir
from rematbench.paper.tables.scores import decision_table, score_tables
from tests.problems import all_methods

ROWS = read_sheet(data_dir("published") / "runs.csv")
FUJII = [row for row in ROWS if "Fujii" in row["source"] and row["gpus"] == "64"]


def row(speed: float, predicted: float, **changes: Any) -> dict[str, Any]:
    given = {
        "source": "s", "gpus": "8", "seq_len": "4096", "status": "ok", "pred_status": "ok",
        "tp": "1", "tokens_per_s_per_gpu": speed or "", "pred_tokens_per_s_per_gpu": predicted,
    }  # fmt: skip
    return {**given, **changes}


def test_the_pick_loses_what_the_best_measured_row_has_more() -> None:
    assert regret([row(100, 90), row(80, 95)]) == pytest.approx(0.2)
    assert regret([row(100, 96), row(80, 95)]) == 0.0
    assert regret([row(100, 90), row(80, 95, pred_status="oom")]) == 0.0


def test_a_pick_that_was_out_of_memory_loses_all() -> None:
    out = row(0, 99, status="oom")
    assert regret([row(100, 90), out]) == 1.0
    assert regret([row(100, 90), {**out, "pred_status": "oom"}]) == 0.0
    assert regret([row(100, 90, pred_status="oom")]) == 1.0


def test_a_sweep_is_one_job_in_four_layouts() -> None:
    four = [row(100, 90, tp=str(tp)) for tp in (1, 2, 4, 8)]
    assert [len(cells) for cells in sweeps(four).values()] == [4]
    assert not sweeps(four[:3])
    assert not sweeps([*four[:3], row(100, 90, tp="8", gpus="16")])
    assert not sweeps([*four[:3], row(0, 90, tp="8", status="dash")])


def test_ranks_and_not_distances_are_correlated() -> None:
    assert rank_correlation([row(1, 1), row(2, 50), row(3, 60)]) == pytest.approx(1.0)
    assert rank_correlation([row(1, 3), row(2, 2), row(3, 1)]) == pytest.approx(-1.0)
    assert rank_correlation([row(1, 3), row(2, 2)]) is None


def test_one_mfu_takes_any_layout_that_the_formula_lets_fit() -> None:
    registry = all_methods()
    cells = [cell for cell in FUJII if cell["status"] == "ok" and "a100" in cell["cluster"]]
    shares = [formula_share(cell, registry) for cell in cells]
    best = max(float(cell["tokens_per_s_per_gpu"]) for cell in cells)
    fitting = [c for c, share in zip(cells, shares, strict=True) if share and share <= 1.0]
    assert 0 < len(fitting) <= len(cells)
    lost = [1 - float(cell["tokens_per_s_per_gpu"]) / best for cell in fitting]
    assert constant_mfu_regret(cells, registry) == pytest.approx(sum(lost) / len(lost))
    assert constant_mfu_regret([{**cells[0], "recompute": "balanced"}], registry) is None
    own = [{**cell, "offload_fraction": ""} for cell in cells]
    assert constant_mfu_regret(own, registry) == constant_mfu_regret(cells, registry)
    assert constant_mfu_regret([{**cells[0], "offload_fraction": "0.5"}], registry) is None


def test_the_table_has_sweeps_out_of_source_and_their_mean() -> None:
    cells = [{**cell, "pred_status": "ok", "pred_tokens_per_s_per_gpu": 1.0} for cell in FUJII]
    found = decisions(cells, [])
    assert len(found) == 2
    assert all(one.left_out is None and one.regret is not None for one in found)
    strange = decisions([], cells)
    assert [one.left_out for one in strange] == [one.regret for one in found]
    assert summary(strange)["regret"] is None
    last = decision_table(found).rows[-1]
    assert last["source"] == "mean over 2 sweeps"
    assert last["rows"] == sum(one.rows for one in found)


def test_sweeps_of_the_other_sheet_are_decided_as_shipped() -> None:
    """Both columns of regrets are of the same sweeps, whichever sheet has them."""
    cells = [{**cell, "pred_status": "ok", "pred_tokens_per_s_per_gpu": 1.0} for cell in FUJII]
    other = [{**cell, "source": "other", "sheet": MORE} for cell in cells]
    report = validate(cells, calibration(), Accuracy(groups=()))
    told = (report, [*cells, *other], calibration(), Accuracy(groups=()))
    made = {table.name: table for table in score_tables(*told)}
    assert made["decisions"].rows[-1]["source"] == "mean over 4 sweeps"
    last = decision_table([*decisions(cells, []), *decisions([], other)]).rows[-1]
    assert (last["source"], last["regret"], last["left_out"]) == ("mean over 4 sweeps", None, None)
