"""What FP8 buys: published steps beside steps of the same job in bf16, and ours."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, combinations
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
PEAK = "peak_device_bytes"
LAYOUT = ("tp", "cp", "pp")
PAIR = ("source", "gpu", "model", "gpus", "seq_len", "global_batch")
"""The columns of a job whose steps are put in order, whatever else differs."""
LEAST = 1.05
"""The least ratio of two published speeds whose order counts."""
Row = Mapping[str, Any]


def build(cells: Path) -> Table:
    rows = list(read_predicted(cells))
    dense = of_sheet(rows, "fp8.csv")
    return fp8_table(dense, [*right_orders(dense), *right_orders(of_sheet(rows, "moe.csv"))])


def right_orders(rows: Iterable[Row]) -> Iterator[bool]:
    """Whether the predicted order of two published steps of one job is right, for pairs of which
    one at least is quantised and whose speeds differ by more than LEAST."""
    jobs: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row[SPEED] and row[f"pred_{SPEED}"]:
            jobs[tuple(row[key] for key in PAIR)].append(row)
    for a, b in chain.from_iterable(combinations(own, 2) for own in jobs.values()):
        theirs, ours = (float(a[key]) / float(b[key]) for key in (SPEED, f"pred_{SPEED}"))
        plain = {a["precision"], b["precision"]} <= {"", "bf16", "fp16"}
        if not plain and max(theirs, 1 / theirs) > LEAST:
            yield (theirs > 1) == (ours > 1)


def fp8_table(rows: Iterable[Row], orders: list[bool]) -> Table:
    """A line for each model, GPU, stack and recipe: the mean gain over twins, published and ours,
    the mean error of the speed in FP8, and, where both twins print a peak, the mean ratio of
    their bytes, published and ours."""
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
