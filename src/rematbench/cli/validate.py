"""The command `validate`: predictions scored against published cells, or a user's."""

from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from typer import Option

from rematbench.cli.sheet import PROCESSES
from rematbench.cli.targets import Predictions
from rematbench.evidence.accuracy import Report, Sheet, by_source, left_out_errors, load_accuracy
from rematbench.evidence.accuracy import validate as score
from rematbench.evidence.job_evidence import out_of_source
from rematbench.evidence.predict import predict_rows
from rematbench.evidence.published.derived import BESIDE, PUBLISHED
from rematbench.evidence.published.sheets import SCORED, SPEED, STEP, Cell, read_cells
from rematbench.evidence.published.words import committed
from rematbench.host.console import CommandError, console, plain, progress_bar, rich_table
from rematbench.inputs.load import calibration
from rematbench.paper.tables.scores import how_to_read, out_of_source_means, score_tables

MEASURED = (SPEED, STEP, "peak_device_bytes")
"""Columns with a measurement that a prediction is scored against."""


def validate(
    rows: Annotated[
        Path | None,
        Option(
            "--rows",
            metavar="MINE.csv",
            help="Sheet with your measured rows; errors are shown by source.",
        ),
    ] = None,
    predictions: Predictions = None,
    processes: PROCESSES = 2,
) -> None:
    """Print errors of predictions by source, next to those of a constant MFU.

    Without --rows the published cells are predicted; exit code 1 if an error exceeds the promised
    accuracy (`accepted`).  --predictions scores only the sheets that its rows name (in the column
    `sheet`; without this column, runs.csv).

    \b
    Example:
      rematbench validate
      rematbench validate --rows my-measurements.csv
    """
    if rows is not None and predictions is not None:
        raise CommandError("--rows and --predictions: give only one of these options")
    if predictions is not None:
        cells = list(read_cells(predictions, "--predictions", "pred_status"))
    elif rows is not None:
        cells = _predicted(read_cells(rows, "--rows", *SCORED), processes)
    else:
        cells = _predicted([row for name in get_args(Sheet) for row in committed(name)], processes)
    published = (PUBLISHED, BESIDE)
    cells = [cell for cell in cells if cell.get("cell", PUBLISHED) in published]
    if rows is not None and not any(cell.get(key) for cell in cells for key in MEASURED):
        raise CommandError(f"{rows}: no row has a value of {' or '.join(MEASURED)}")
    accuracy = load_accuracy() if rows is None else by_source(cells)
    strange = out_of_source() if rows is None else ()
    left_out = left_out_errors(strange, accuracy, calibration())
    report = score(cells, calibration(), accuracy, left_out)
    made = score_tables(report, cells, calibration(), accuracy, strange)
    out = console()
    for table in made:
        if table.name != "cells" and table.rows:
            out.print(rich_table(table.printed()))
            out.print()
    out.print(plain(how_to_read(calibration())))
    if left_out and strange:
        out.print(plain(out_of_source_means(left_out, strange)))
    _verdict(out, report)


def _predicted(sheet: list[Cell], processes: int) -> list[Cell]:
    with progress_bar("predicting") as advance:
        return predict_rows(sheet, processes=processes, progress=advance)


def _verdict(out: Console, report: Report) -> None:
    for check in report.failed:
        out.print(plain(f"FAIL: {check.group}: {check.statistic} exceeds `accepted`"))
    if report.failed:
        raise typer.Exit(1)
    promised = any(group.checks for group in report.groups)
    passed = "all errors are within `accepted`"
    out.print(plain(passed if promised else "these rows have no accuracy target"))
