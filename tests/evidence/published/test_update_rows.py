"""Seconds of published updates with states in host memory: the fitted constants, and the bars."""

from statistics import median
from typing import Any

import pytest

from rematbench.evidence.published.host_rows import NODES, row_problem
from rematbench.evidence.published.sheets import read_sheet
from rematbench.evidence.published.update_rows import (
    INTERLEAVED,
    SERIAL,
    HostKind,
    fitted_rates,
    fitted_shares,
    plan_of,
    update_rows,
)
from rematbench.inputs.load import calibration, load_cluster
from rematbench.inputs.paths import data_dir

ROWS = update_rows()


def errors(rows: list[dict[str, Any]]) -> list[float]:
    return [abs(row["pred_update_s"] / float(row["update_s"]) - 1.0) for row in rows]


@pytest.mark.parametrize("node", ["polaris-a100-40gb-bound", "h100-80gb-dos"])
def test_the_rate_of_a_node_is_that_of_its_fitted_rows(node: str) -> None:
    found = fitted_rates()[HostKind(node, load_cluster(node).gpus_per_node)]
    assert load_cluster(node).host_update_parameters_per_s == pytest.approx(found, rel=1e-3)


def test_the_two_shares_are_those_of_the_interleaved_rows() -> None:
    common = calibration().common
    shares = (common.host_beside_share, common.visit_delay_share)
    assert shares == pytest.approx(fitted_shares(), rel=2e-3)


def test_updates_one_after_another_are_predicted() -> None:
    """The bars, 5 and 10 %, were set before any error was seen."""
    held = [row for row in ROWS if row["table"] == SERIAL and not row["update_fitted"]]
    ratios = [row for row in held if row["host_ratio"] != "1"]
    assert len(held) == 41
    assert len(ratios) == 18
    for rows in (held, ratios):
        assert median(errors(rows)) < 0.05
        assert max(errors(rows)) < 0.10


def test_interleaved_updates_are_met_with_two_constants() -> None:
    """The bar of all rows, 6 %, was set before any error was seen.  K = 2 alone misses it: one node
    is predicted too slow and the other too fast, and a constant of a node would be a third."""
    rows = [row for row in ROWS if row["table"] == INTERLEAVED]
    assert len(rows) == 26
    assert median(errors(rows)) < 0.06
    by_interleave = {k: [row for row in rows if row["update_interleave"] == k] for k in "25"}
    assert median(errors(by_interleave["5"])) < 0.06
    assert median(errors(by_interleave["2"])) < 0.07


def test_every_row_of_a_named_node_is_compared() -> None:
    sheet = read_sheet(data_dir("published") / "offloaded_states.csv")
    named = [row for row in sheet if row["cluster"] in NODES and row["update_s"]]
    assert len(named) == len(ROWS) == 106


def test_ratio_and_interleave_count_sub_groups() -> None:
    (row,) = [r for r in ROWS if r["variant"] == "dos" and r["host_ratio"] == "0.5"]
    given = row_problem(row)
    plan, count = plan_of(row, given)
    counts = plan.state("optimizer").counts(count)
    assert counts["device"] / count == pytest.approx(0.5, abs=0.05)
    hosted = counts["host"] + counts["visit"]
    assert counts["visit"] / hosted == pytest.approx(1 / 2, abs=0.05)
