"""Errors of predicted optimizer updates with states in host memory, and of the other phases of
their steps, by node and by what was run."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rematbench.evidence.accuracy import ratio_error
from rematbench.evidence.hosted import INTERLEAVED, is_update_fitted
from rematbench.evidence.published.sheets import read_predicted
from rematbench.host.table import grouped
from rematbench.paper.sheet.table import Table, table_of

INPUTS = {"predictions": "results/paper/tables/predictions.csv"}
PHASES = ("update", "forward", "backward", "step")


def build(predictions: Path) -> Table:
    """The table of the rows of offloaded_states.csv with predicted seconds of the update."""
    return updates_table([row for row in read_predicted(predictions) if row["pred_update_s"]])


def updates_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each phase, node, number of nodes, order of pieces, kind of gradient copies and
    split."""
    groups = grouped(
        ((phase, *_what_ran(row, phase)), error)
        for phase in PHASES
        for row in rows
        if (error := ratio_error(row, f"{phase}_s")) is not None
    )
    names = ("phase", "node", "nodes", "pieces", "interleave", "copies", "split")
    lines = [
        dict(zip(names, key, strict=True))
        | {
            "rows": len(errors),
            "median_error": median(map(abs, errors)),
            "worst_error": max(map(abs, errors)),
            "median_signed": median(errors),
        }
        for key, errors in sorted(groups.items(), key=lambda one: (PHASES.index(one[0][0]), one))
    ]
    return table_of("offloaded_updates", lines)


def _what_ran(row: dict[str, Any], phase: str) -> tuple[str, ...]:
    """The node, nodes, pieces, interleave, copies and split of a row; `-` for what the phase does
    not depend on."""
    cluster, pieces = row["cluster"], row["table"]
    nodes = "one" if row["node"].endswith(" x1") else "several"
    if phase == "update":
        fitted = is_update_fitted(row) or pieces == INTERLEAVED
        every, split = row["update_interleave"] or "-", "fitted" if fitted else "held-out"
        return cluster, "-", pieces, every, "-", split
    if phase == "forward":
        return cluster, nodes, "-", "-", "-", "held-out"
    split = "held-out" if phase == "backward" else "-"
    return cluster, nodes, pieces, "-", row["gradient_copy"], split
