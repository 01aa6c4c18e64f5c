"""What tracing the paper-scale cells cost, as committed: every cell, below a minute and 4 GB."""

from pathlib import Path

from rematbench.evidence.published.sheets import read_sheet
from rematbench.worlds.records.cell import cell_names
from rematbench.worlds.records.suite import load_suite

ROOT = Path(__file__).resolve().parents[2]


def rows() -> list[dict[str, str]]:
    return read_sheet(ROOT / "benchmarks/traced_cost.csv")


def test_every_cell_costs_less_than_a_minute_and_4_gb() -> None:
    assert [row["cell"] for row in rows()] == cell_names(load_suite(ROOT / "config/traced.yaml"))
    for row in rows():
        assert float(row["cpu_s"]) < 60, row
        assert int(row["peak_rss_bytes"]) < 4 << 30, row
        assert row["torch"], row


def test_the_page_says_the_largest_of_them() -> None:
    page = (ROOT / "docs/executed.md").read_text(encoding="utf-8")
    seconds = max(float(row["cpu_s"]) for row in rows() if row["status"] == "ok")
    peak = max(int(row["peak_rss_bytes"]) for row in rows())
    assert f"at most {seconds:g} CPU seconds and {peak / 1e9:.2f} GB" in page
