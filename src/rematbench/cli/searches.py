"""The command `searches`: published layouts, cells of the matrix, published sweeps, spaces of
packages."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from rematbench.cli.options import Within
from rematbench.cli.targets import need_file
from rematbench.evidence.published.sheets import CONFIGURATION, SCORED, SPEED, read_sheet
from rematbench.host.console import CommandError, console, plain
from rematbench.host.table import write_sheet
from rematbench.paper.matrix.best import best_lines
from rematbench.paper.matrix.spec import load_matrix
from rematbench.paper.studies.package_spaces import load_spaces, searched_spaces
from rematbench.paper.studies.published_layouts import against
from rematbench.paper.studies.published_sweeps import searched_sweeps

Csv = Annotated[Path, Option("-o", "--output", metavar="FILE.csv", help="Where to write.")]
Processes = Annotated[int, Option(min=1, max=64, help="Worker processes.")]
Line = Mapping[str, Any]
Kind = Literal["layouts", "cells", "sweeps", "spaces"]
PREDICTED = (
    *CONFIGURATION,
    *SCORED,
    *("pred_status", f"pred_{SPEED}", "pred_device_total_bytes", "pred_headroom_bytes"),
)
"""Columns that predicted rows need."""


def searches(
    kind: Annotated[Kind, Argument(help="Kind of search.")],
    inputs: Annotated[
        list[Path], Argument(metavar="FILE...", help="Files that list what to search.")
    ],
    output: Csv,
    table: Annotated[
        str, Option(metavar="NAME", help="For layouts: only the rows of this table.")
    ] = "",
    model: Annotated[
        list[str] | None, Option(help="For cells: only this model (repeatable).")
    ] = None,
    seq_len: Annotated[
        list[int] | None, Option(help="For cells: only this sequence length (repeatable).")
    ] = None,
    within: Within = 2.0,
    processes: Processes = 2,
) -> None:
    """Search many jobs, and write a line for each as soon as its search ends.

    layouts SHEET.csv: what published layouts lose against the best of a search.  cells SUITE.yaml:
    the best layout of every arm in every cell of the matrix, and the fastest plan of all.  sweeps
    PRED.csv...: what following the search would have lost on published sweeps.  spaces JOBS.yaml:
    the fastest plan of a whole space, and the fastest that a package alone can run.  A suite of
    cells or spaces sets the gap itself (`within:`).

    \b
    Example:
      rematbench searches layouts results/published/runs.csv --table "Figure 9" -o figure9.csv
    """
    need_file("-o", output)
    share = within / 100
    if kind == "layouts":
        sheet = [row for path in inputs for row in read_sheet(path, CONFIGURATION)]
        rows = [row for row in sheet if not table or row.get("table") == table]
        if not rows:
            raise CommandError(f"{inputs[0]}: has no row for table {table!r}")
        _write(output, against(rows, within=share, processes=processes), "loss")
    elif kind == "cells":
        spec = load_matrix(inputs[0]).restricted(model or (), seq_len or ())
        _write(output, best_lines(spec, processes=processes), "gap")
    elif kind == "sweeps":
        rows = [row for path in inputs for row in read_sheet(path, PREDICTED)]
        _write(output, searched_sweeps(rows, within=share, processes=processes), "regret")
    else:
        found = searched_spaces(load_spaces(inputs[0]), processes=processes)
        _write(output, found, "mfu_causal")


def _write(output: Path, lines: Iterable[Line], column: str) -> None:
    """Write and print each line as soon as its search ends."""
    found: list[Line] = []
    for line in lines:
        found.append(line)
        share = line.get(column)
        text = f"{100 * share:.1f} %" if share is not None else ""
        text = f"{text} {line.get('reason') or ''}".strip()
        keys = ("model", "cluster", "gpus", "seq_len", "table", "arm")
        where = " ".join(str(line[key]) for key in keys if key in line)
        console().print(plain(f"{where} {line.get('space', '')}: {column} {text}"))
        write_sheet(output, found)
