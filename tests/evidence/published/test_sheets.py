"""Every row of the committed sheets is read, or refused by the columns that say why."""

import re
from collections import Counter

import pytest

from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import Cell, RowError
from rematbench.evidence.published.words import committed, sheets
from tests.predicted import predicted, published
from tests.problems import all_methods
from tests.tables import tables

TABLES = tables(__file__)

LAYOUT = "layout not published"
RECOMPUTATION = "recomputation not published"
ROWS: dict[str, dict[str, int]] = TABLES["rows"]
"""The rows of each sheet that are read, and the columns that refuse the others."""
MOE = {
    "bf16": {"read": 79, "offload": 7, LAYOUT: 3, RECOMPUTATION: 4},
    "fp8": {"read": 18, "router": 8, RECOMPUTATION: 2},
    "mxfp8": {"read": 85, "router": 5, "offload": 2, RECOMPUTATION: 4},
}
"""The rows of moe.csv, by precision."""


def outcome(row: Cell) -> str:
    """`read`, or the columns whose words refuse a row, or the reason."""
    try:
        read_case(row, all_methods())
    except RowError as error:
        columns = re.findall(r"column (\w+): ", str(error))
        return " ".join(columns) or str(error).partition(":")[0].removeprefix("column ")
    return "read"


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_read_or_refused_by_its_columns(name: str) -> None:
    found = Counter(map(outcome, committed(name)))
    assert found == ROWS[name]


def test_rows_of_experts_are_read_or_refused_by_their_columns() -> None:
    found: dict[str, Counter[str]] = {}
    for row in committed("moe.csv"):
        found.setdefault(row["precision"], Counter())[outcome(row)] += 1
    assert found == MOE


def test_the_sheets_are_those_of_the_table() -> None:
    assert {*sheets()} == {*ROWS, "moe.csv"}


def test_a_sheet_gives_its_rows_the_cells_that_they_lack() -> None:
    (row, *_) = committed("adapters.csv")
    assert (row["sheet"], row["row"], row["model"]) == ("adapters.csv", "1", "mistral-7b")
    assert (row["tp"], row["recompute"]) == ("1", "full")


@pytest.mark.full
def test_opened_sheets_are_predicted() -> None:
    counts = {
        name: Counter(row["pred_status"] for row in predicted(published(name)))
        for name in ("moe_more.csv", "runs_opened.csv", "nemo_opened.csv")
    }
    assert counts == {
        "moe_more.csv": {"ok": 19, "unsupported": 1},
        "runs_opened.csv": {"ok": 17},
        "nemo_opened.csv": {"ok": 7, "oom": 1},
    }


def test_one_predictor_has_what_a_row_prints() -> None:
    """Phases and host bytes only where a row has them."""
    row = committed("offloaded_states.csv")[2]
    (found,) = predicted([row])
    assert all(float(found[f"pred_{name}"]) > 0 for name in ("forward_s", "update_s"))
    assert float(found["pred_host_used_gib"]) > 0
    plain = {key: value for key, value in row.items() if key not in ("update_s", "host_used_gib")}
    (other,) = predicted([plain])
    assert "pred_forward_s" not in other
    assert other["pred_step_s"] == found["pred_step_s"]


@pytest.mark.parametrize(("word", "method", "vpp"), TABLES["schedules"])
def test_words_of_schedules(word: str, method: str, vpp: int) -> None:
    row = {**committed("pipeline_vocabulary.csv")[0], "schedule": word}
    case = read_case(row, all_methods())
    assert case.method.endswith(f":schedule={method}")
    assert case.layout.vpp == vpp


def test_a_last_stage_may_have_the_head_alone() -> None:
    row = {**committed("pipeline_vocabulary.csv")[1], "layers_of_last_stage": "0"}
    assert read_case(row, all_methods()).layout.stages.endswith("(t*5|)*4L")
