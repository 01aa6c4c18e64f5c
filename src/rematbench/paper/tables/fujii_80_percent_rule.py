"""Fujii's 80 % rule on published cells, by source, cluster and published status."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rematbench.evidence.published.derived import PUBLISHED
from rematbench.evidence.published.sheets import read_predicted
from rematbench.paper.sheet.table import Column, Table, columns, percent, whole
from rematbench.paper.studies.rule80 import scored_cells
from rematbench.plugins.discover import discover

INPUTS = {"predictions": "results/paper/tables/predictions.csv"}
Row = Mapping[str, Any]
CALLED = {True: "safe", False: "not safe"}
MEANING = {
    ("ok", True): "true negative",
    ("ok", False): "false alarm",
    ("oom", True): "missed OOM",
    ("oom", False): "true positive",
}
"""The meaning of (published status, called safe).  A positive is a cell that the rule does not call
safe; a dash has no meaning."""


def build(predictions: Path) -> Table:
    """The table of the published cells."""
    cells = read_predicted(predictions)
    return rule_table([cell for cell in cells if cell["cell"] == PUBLISHED])


def rule_table(rows: Sequence[Row]) -> Table:
    """The table of cells by source, cluster, published status and the rule's verdict."""
    cells = scored_cells(rows, discover())
    lines = []
    for key in sorted({(c["source"].partition(",")[0], c["cluster"], c["status"]) for c in cells}):
        for safe in (True, False):
            chosen = [
                cell
                for cell in cells
                if (cell["source"].partition(",")[0], cell["cluster"], cell["status"]) == key
                and cell["safe"] is safe
            ]
            if chosen:
                lines.append(_line(key, safe, chosen))
    return Table(
        name="fujii_80_percent_rule",
        title="Fujii's 80 % rule on published cells without recomputation or offloading",
        columns=(
            *columns("source cluster published"),
            Column("called", "rule says"),
            Column("cells", "cells", whole),
            Column("meaning", "which is a"),
            Column("least", "least estimate, % of device", percent),
            Column("most", "most, %", percent),
            Column("ledger_fits", "of these, fit by our ledger", whole),
        ),
        rows=tuple(lines),
        note=_note(cells),
    )


def _line(key: tuple[str, str, str], safe: bool, cells: Sequence[Row]) -> dict[str, Any]:
    source, cluster, status = key
    shares = [cell["share"] for cell in cells]
    judged = [cell["pred_status"] for cell in cells if cell.get("pred_status") in ("ok", "oom")]
    return {
        "source": source,
        "cluster": cluster,
        "published": status,
        "called": CALLED[safe],
        "cells": len(cells),
        "meaning": MEANING.get((status, safe), "dash: cause not published"),
        "least": min(shares),
        "most": max(shares),
        "ledger_fits": judged.count("ok") if judged else "",
    }


def _note(cells: Sequence[Mapping[str, Any]]) -> str:
    def count(status: str, safe: bool) -> int:
        return sum(cell["status"] == status and cell["safe"] is safe for cell in cells)

    return (
        "World: a paper's formula against published results. Positive: the rule does not call "
        "the cell safe. The rule was derived from Fujii's cells, so only the other sources test "
        "it. "
        f"{count('oom', False)} true positives, {count('ok', False)} false alarms, "
        f"{count('ok', True)} true negatives, {count('oom', True)} missed OOM. "
        f"Dashes are counted separately: {count('dash', True)} called safe, "
        f"{count('dash', False)} not."
    )
