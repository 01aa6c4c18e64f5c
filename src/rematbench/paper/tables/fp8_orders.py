"""Which of two published steps of one job is faster, and whether ours says the same: pairs of which
at least one is quantised, by sheet and by what the two differ in first."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from rematbench.evidence.accuracy import Sheet, of_sheet
from rematbench.evidence.published.sheets import SPEED, Row, number, read_predicted
from rematbench.paper.sheet.table import Table, table_of

INPUTS = {"cells": "results/paper/tables/predictions.csv"}
PAIR = ("source", "gpu", "model", "gpus", "seq_len", "global_batch")
"""The columns of one job: its layout, stack, recomputation and precision may differ."""
SHEETS: tuple[Sheet, ...] = ("fp8.csv", "moe.csv")
PLAIN = ("", "bf16", "fp16")
LEAST = 1.05
"""The least ratio of two published speeds whose order counts: releases differ by 5 % for nothing
that is printed (docs/accuracy.md)."""


def build(cells: Path) -> Table:
    rows = list(read_predicted(cells))
    return orders_table({sheet: of_sheet(rows, sheet) for sheet in SHEETS})


def orders_table(sheets: dict[Sheet, list[Row]]) -> Table:
    """A line for each sheet and pair of precisions: pairs whose published speeds differ by more
    than LEAST, and those whose predicted speeds are in the same order."""
    found: dict[tuple[str, str], Counter[bool]] = defaultdict(Counter)
    for sheet, rows in sheets.items():
        for words, right in _pairs(rows):
            found[sheet, words][right] += 1
    return table_of(
        "fp8_orders",
        (
            {"sheet": sheet, "precisions": words, "pairs": own.total(), "right": own[True]}
            for (sheet, words), own in sorted(found.items())
        ),
    )


def _pairs(rows: Iterable[Row]) -> Iterator[tuple[str, bool]]:
    """The precisions of each pair that counts, and whether its predicted order is right."""
    jobs: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if number(row, SPEED) and number(row, f"pred_{SPEED}"):
            jobs[tuple(row[key] for key in PAIR)].append(row)
    for a, b in itertools.chain.from_iterable(itertools.combinations(v, 2) for v in jobs.values()):
        words = sorted((a["precision"], b["precision"]))
        theirs, ours = (
            (number(a, key) or 0.0) / (number(b, key) or 1.0) for key in (SPEED, f"pred_{SPEED}")
        )
        if not {*words} <= {*PLAIN} and max(theirs, 1 / theirs) > LEAST:
            yield " and ".join(dict.fromkeys(words)), (theirs > 1) == (ours > 1)
