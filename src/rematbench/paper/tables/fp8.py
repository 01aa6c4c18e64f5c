"""What FP8 buys: published steps beside steps of the same job in bf16, and ours."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from rematbench.evidence.accuracy import of_sheet
from rematbench.evidence.published.sheets import SPEED, read_predicted
from rematbench.paper.sheet.table import Table, table_of

INPUTS = {"cells": "results/paper/tables/predictions.csv"}
JOB = ("source", "system", "gpu", "model", "gpus", "seq_len", "global_batch", "recompute")
"""The columns of a job that twins share; their layouts may differ, and a source's choice of one
counts with the recipe."""
LAYOUT = ("tp", "cp", "pp")
Row = Mapping[str, Any]


def build(cells: Path) -> Table:
    return fp8_table(of_sheet(read_predicted(cells), "fp8.csv"))


def fp8_table(rows: Iterable[Row]) -> Table:
    """A line for each model, GPU, stack and recipe: the mean gain over twins, published and ours,
    and the mean error of the speed in FP8."""
    timed = [row for row in rows if row[SPEED] and row[f"pred_{SPEED}"]]
    twins = {tuple(row[k] for k in JOB): row for row in timed if row["precision"] == "bf16"}
    found: dict[tuple[str, ...], list[tuple[float, float, float]]] = {}
    for row in timed:
        twin = twins.get(tuple(row[key] for key in JOB))
        if twin is None or row["precision"] == "bf16":
            continue
        theirs, ours = (float(row[k]) / float(twin[k]) for k in (SPEED, f"pred_{SPEED}"))
        other = any(row[key] != twin[key] for key in LAYOUT)
        names = (row["model"], row["gpu"], row["system"], row["precision"])
        error = abs(float(row[f"pred_{SPEED}"]) / float(row[SPEED]) - 1.0)
        place = (*names, "in another layout" if other else "")
        found.setdefault(place, []).append((theirs, ours, error))
    return table_of(
        "fp8",
        (
            {
                **dict(zip(("model", "gpu", "system", "precision", "twin"), place, strict=True)),
                "rows": len(values),
                **{
                    key: fmean(one[index] for one in values)
                    for index, key in enumerate(("published", "ours", "error"))
                },
            }
            for place, values in sorted(found.items())
        ),
    )
