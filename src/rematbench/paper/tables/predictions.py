"""All predicted cells of the published sheet, joined from the bundles into one sheet."""

from pathlib import Path

from rematbench.evidence.published.sheets import read_predicted
from rematbench.paper.sheet.table import Table, sheet

INPUTS = {"bundles": "results/paper/predictions/{bundle}.csv"}
SHEETS = ("predictions",)


def build(bundles: list[Path]) -> Table:
    """The rows of all bundles, one bundle after the other."""
    return sheet("predictions", [row for path in bundles for row in read_predicted(path)])
