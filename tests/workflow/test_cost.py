"""What simulated cells cost through Snakemake; CPU seconds, as machines are shared."""

from pathlib import Path

import pytest

from benchmarks.workflow import checkout, run, table, write
from rematbench.evidence.published.sheets import read_sheet
from rematbench.worlds.slurm.campaign import CampaignSuite
from tests.workflow.checkout import ROOT

LIMIT_S = 60
MEASURED = ROOT / "benchmarks/workflow.csv"


def rows() -> list[dict[str, str]]:
    """The committed lines."""
    return read_sheet(MEASURED)


def test_the_table_of_the_page_is_the_measured_one() -> None:
    page = (ROOT / "docs/decisions/worlds.md").read_text(encoding="utf-8")
    assert table(rows()) in page
    assert {(row["where"], row["cells"]) for row in rows()} >= {
        (where, cells) for where in ("here", "Slurm") for cells in ("10", "100", "1000")
    }
    assert all(row["snakemake"] and row["date"] and row["load"] for row in rows())
    assert f"`cells_per_job: {CampaignSuite(problems=()).cells_per_job}`" in page


def test_a_line_replaces_the_one_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    first = {"where": "here", "cells": "100", "jobs": "1", "wall_s": "9"}
    write(path, [first, first | {"cells": "10"}])
    write(path, [first | {"wall_s": "8"}])
    found = [(row["cells"], row["wall_s"]) for row in read_sheet(path)]
    assert found == [("10", "9"), ("100", "8")]


@pytest.mark.soak
def test_a_thousand_cells_in_a_minute_of_two_cores(tmp_path: Path) -> None:
    checkout(tmp_path, cells=1000, jobs=10)
    words = ["snakemake", "results/smoke/tables/runs.csv", "--cores", "2", "--scheduler", "greedy"]
    cost = run(tmp_path, words)
    assert cost.cpu_s < LIMIT_S, "on one core alone, so within it on two"
    assert len((tmp_path / "results/smoke/tables/runs.csv").read_text().splitlines()) == 1001
