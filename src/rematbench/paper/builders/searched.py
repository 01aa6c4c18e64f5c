"""Searches of many jobs, a line for each: published layouts, cells of the matrix, published sweeps,
spaces of packages."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rematbench.evidence.job_evidence import SHEETS
from rematbench.evidence.published.sheets import CONFIGURATION, SCORED, SPEED, read_sheet
from rematbench.host.table import write_sheet
from rematbench.paper.matrix.best import best_lines
from rematbench.paper.matrix.spec import load_matrix
from rematbench.paper.studies.package_spaces import load_spaces, searched_spaces
from rematbench.paper.studies.published_layouts import against
from rematbench.paper.studies.published_sweeps import searched_sweeps

Line = Mapping[str, Any]
FIGURE = "Figure 9"
"""The table whose published layouts are compared with the best of a search."""
PREDICTED = (
    *CONFIGURATION,
    *SCORED,
    *("sheet", "pred_status", f"pred_{SPEED}", "pred_device_total_bytes", "pred_headroom_bytes"),
)
"""The columns that a sheet of predicted rows must have."""
PROCESSES = 2


def build(output: Path, values: Mapping[str, str], **inputs: Path) -> str:
    """Write a line for each search as soon as it ends.

    layouts: what published layouts lose against the best of a search.  cells: the best layout of
    every arm in every cell of the matrix, and the fastest plan of all.  sweeps: what following the
    search would have lost on published sweeps.  spaces: the fastest plan of a whole space, and the
    fastest that a package alone can run.  `within`: the gap, in per cent; a suite of cells or
    spaces sets it itself.
    """
    kind, files = values["kind"], list(inputs.values())
    if kind == "cells":
        return _write(output, best_lines(load_matrix(files[0]), processes=PROCESSES), "gap")
    if kind == "spaces":
        found = searched_spaces(load_spaces(files[0]), processes=PROCESSES)
        return _write(output, found, "mfu_causal")
    share = float(values["within"]) / 100
    if kind == "layouts":
        rows = [row for row in read_sheet(files[0], CONFIGURATION) if row.get("table") == FIGURE]
        return _write(output, against(rows, within=share, processes=PROCESSES), "loss")
    rows = [row for row in read_sheet(files[0], PREDICTED) if row["sheet"] in SHEETS]
    return _write(output, searched_sweeps(rows, within=share, processes=PROCESSES), "regret")


def _write(output: Path, lines: Iterable[Line], column: str) -> str:
    """Write and print each line as soon as its search ends."""
    found: list[Line] = []
    for line in lines:
        found.append(line)
        share = line.get(column)
        text = f"{100 * share:.1f} %" if share is not None else ""
        keys = ("model", "cluster", "gpus", "seq_len", "table", "arm", "space")
        where = " ".join(str(line[key]) for key in keys if key in line)
        sys.stderr.write(f"{where}: {column} {text} {line.get('reason') or ''}\n")
        write_sheet(output, found)
    return f"{output}: {len(found)} searches"
