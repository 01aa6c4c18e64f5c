"""The gain of FP8: published steps against bf16 steps of the same job, and our predictions."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from rematbench.evidence.accuracy import of_sheet
from rematbench.evidence.published.sheets import SPEED, read_predicted
from rematbench.host.table import grouped
from rematbench.paper.sheet.table import Table, table_of

INPUTS = {"cells": "results/paper/tables/predictions.csv"}
JOB = ("source", "system", "gpu", "model", "gpus", "seq_len", "global_batch", "recompute")
"""The columns in which a quantised row equals its bf16 twin.  Their layouts may differ, so a gain
includes the source's choice of layout."""
PEAK = "peak_device_bytes"
LAYOUT = ("tp", "cp", "pp")
PAIR = ("source", "gpu", "model", "gpus", "seq_len", "global_batch")
"""The columns that define a job, whose rows are compared in pairs."""
LEAST = 1.05
"""The smallest ratio of two published speeds whose order is compared."""
Row = Mapping[str, Any]


def build(cells: Path) -> Table:
    rows = list(read_predicted(cells))
    dense = of_sheet(rows, "fp8.csv")
    return fp8_table(dense, [*right_orders(dense), *right_orders(of_sheet(rows, "moe.csv"))])


def right_orders(rows: Iterable[Row]) -> Iterator[bool]:
    """For each pair of rows of one job: whether the row that is faster as published is also faster
    as predicted.  Pairs without a quantised row, or closer than LEAST, are left out."""
    timed = (row for row in rows if row[SPEED] and row[f"pred_{SPEED}"])
    jobs = grouped((tuple(row[key] for key in PAIR), row) for row in timed)
    for a, b in chain.from_iterable(combinations(own, 2) for own in jobs.values()):
        theirs, ours = (float(a[key]) / float(b[key]) for key in (SPEED, f"pred_{SPEED}"))
        plain = {a["precision"], b["precision"]} <= {"", "bf16", "fp16"}
        if not plain and max(theirs, 1 / theirs) > LEAST:
            yield (theirs > 1) == (ours > 1)


def fp8_table(rows: Iterable[Row], orders: list[bool]) -> Table:
    """One line per model, GPU, stack and recipe: the mean ratio of its speed to the speed of the
    bf16 twin, as published and as predicted; the mean error of the quantised speed; and, if both
    rows print a peak, the mean ratio of their bytes."""
    timed = [row for row in rows if row[SPEED] and row[f"pred_{SPEED}"]]
    twins = {tuple(row[k] for k in JOB): row for row in timed if row["precision"] == "bf16"}
    found: dict[tuple[str, ...], list[tuple[float | None, ...]]] = {}
    for row in timed:
        twin = twins.get(tuple(row[key] for key in JOB))
        if twin is None or row["precision"] == "bf16":
            continue
        theirs, ours, *held = (
            float(row[k]) / float(twin[k]) if row[k] and twin[k] else None
            for k in (SPEED, f"pred_{SPEED}", PEAK, f"pred_{PEAK}")
        )
        other = any(row[key] != twin[key] for key in LAYOUT)
        names = (row["model"], row["gpu"], row["system"], row["precision"])
        error = abs(float(row[f"pred_{SPEED}"]) / float(row[SPEED]) - 1.0)
        place = (*names, "in another layout" if other else "")
        found.setdefault(place, []).append((theirs, ours, error, *held))
    return table_of(
        "fp8",
        (
            {
                **dict(zip(("model", "gpu", "system", "precision", "twin"), place, strict=True)),
                "rows": len(values),
                **{
                    key: fmean(own) if (own := [n for one in values if (n := one[at])]) else None
                    for at, key in enumerate(("published", "ours", "error", "held", "ours_held"))
                },
            }
            for place, values in sorted(found.items())
        ),
        right=str(sum(orders)),
        pairs=str(len(orders)),
    )
