"""Errors of predicted optimizer updates with states in host memory, by node and by what was run."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rematbench.evidence.published.update_rows import update_rows
from rematbench.host.table import Column, Table, percent, whole

INPUTS = {"sheet": "results/published/offloaded_states.csv"}
READS = ("config/clusters", "config/calibration.yaml")
NOTE = (
    "Seconds of the update alone. The host's rate of a node (and of its number of ranks) is fitted "
    "to the rows with all states on the host and blocking gradient copies. Two shares, by which "
    "copies beside the host's updates slow them, are fitted to all rows of Deep Optimizer States, "
    "so those rows are fitted too. Those runs did not train: the loss leaves the baseline's in "
    "the second step. Lossless here: the executed weights equal those without pieces, bit by bit."
)


def build(sheet: Path) -> Table:
    """The table of the sheet's named nodes."""
    del sheet  # update_rows reads it
    return updates_table(update_rows())


def updates_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each node, order of pieces and split."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        error = abs(row["pred_update_s"] / float(row["update_s"]) - 1.0)
        fitted = row["update_fitted"] or row["variant"] == "dos"
        split = "fitted" if fitted else "held-out"
        key = (row["cluster"], row["table"], row["update_interleave"] or "-", split)
        groups.setdefault(key, []).append(error)
    names = ("node", "pieces", "interleave", "split")
    lines = [
        dict(zip(names, key, strict=True))
        | {"rows": len(errors), "median_error": median(errors), "worst_error": max(errors)}
        for key, errors in sorted(groups.items())
    ]
    return Table(
        name="offloaded_updates",
        title="Optimizer updates with states in host memory: predicted against published",
        columns=(
            *(Column(name, name) for name in names),
            Column("rows", "rows", whole),
            Column("median_error", "median error %", percent),
            Column("worst_error", "worst error %", percent),
        ),
        rows=tuple(lines),
        note=NOTE,
    )
