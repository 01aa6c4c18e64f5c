"""Constants and accuracy: `calibrate` fits the constants, `validate` holds predictions to print."""

from collections.abc import Sequence
from math import fsum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table as RichTable
from typer import Option

from rematbench.cli.sheet import PROCESSES, predicted
from rematbench.cli.targets import Predictions, need_file, need_folder, read, rich_table
from rematbench.cost.constants import Calibration, updated_text
from rematbench.cost.fit import FitReport, Row, fit_rows
from rematbench.host.console import CommandError, console, grid, plain
from rematbench.published.accuracy import load_accuracy, load_left_out
from rematbench.published.calibrate import calibrate as fitted
from rematbench.published.calibrate import leave_one_out, moved
from rematbench.published.scores import READ, score_tables
from rematbench.published.sheets import (
    SCORED,
)
from rematbench.published.validate import Report, by_source
from rematbench.published.validate import validate as score
from rematbench.spec.load import calibration
from rematbench.spec.paths import data_dir


def calibrate(
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="FILE", help="Write the outcome as YAML.")
    ] = None,
    leave_out: Annotated[
        bool, Option("--leave-one-out", help="Refit without each source and predict its cells.")
    ] = False,
    processes: PROCESSES = 2,
) -> None:
    """Refit the `fitted` constants to the declared FIT rows, from their present values.

    Minutes of CPU time.  Nothing is changed without --output; the outcome of a plain fit has the
    form of config/calibration.yaml, that of --leave-one-out the form of config/left_out.yaml.

    \b
    Example:
      rematbench calibrate
      rematbench calibrate --leave-one-out -o config/left_out.yaml
    """
    need_file("-o", output)
    start = calibration()
    rows = [*_published("runs.csv"), *fit_rows(_published("runs_more.csv"), start.fit)]
    if leave_out:
        found = leave_one_out(rows, start, load_accuracy(), processes)
        console().print(_left_out_table(found.errors))
        text = msgspec.yaml.encode(found).decode()
    else:
        report = fitted(rows, start, processes)
        _show(start, report)
        shipped = (data_dir("config") / "calibration.yaml").read_text(encoding="utf-8")
        text = updated_text(shipped, report.calibration)
    if output is not None:
        output.write_text(text, encoding="utf-8")
        typer.echo(f"{output}: written")


def _published(name: str) -> Sequence[Row]:
    return read(data_dir("published") / name, name)


def _left_out_table(errors: dict[str, float]) -> RichTable:
    table = grid("cells", "mean %", title="Mean error with constants that never saw the source")
    for name, error in errors.items():
        table.add_row(name, f"{100 * error:.1f}")
    return table


def _show(start: Calibration, report: FitReport) -> None:
    table = grid("constant", "shipped", "refitted", title="Fitted constants")
    for name, before, after in moved(start, report.calibration):
        table.add_row(name, f"{before:.4g}", f"{after:.4g}")
    errors = grid("source", "FIT rows", "mean %", title="Errors on the fitted rows")
    for source, logs in report.errors.items():
        mean = fsum(abs(value) for value in logs) / len(logs)
        errors.add_row(source, str(len(logs)), f"{100 * mean:.1f}")
    out = console()
    out.print(table)
    out.print(errors)


def validate(
    rows: Annotated[
        Path | None, Option("--rows", metavar="MINE.csv", help="Your rows, by source.")
    ] = None,
    predictions: Predictions = None,
    tables: Annotated[
        Path | None, Option(metavar="DIR", help="Also write the tables (CSV, Markdown, LaTeX).")
    ] = None,
    processes: PROCESSES = 2,
) -> None:
    """Errors of predictions by source, beside a constant-MFU floor; exit 1 past `accepted`.

    Without --rows the published cells are predicted and held to config/accuracy.yaml.

    \b
    Example:
      rematbench validate
      rematbench validate --rows my-measurements.csv
    """
    if rows is not None and predictions is not None:
        raise CommandError("--rows and --predictions: give one of them")
    if tables is not None:
        need_folder("--tables", tables)
    if predictions is not None:
        cells = list(read(predictions, "--predictions", "pred_status"))
    else:
        source = rows or data_dir("published") / "runs.csv"
        cells = predicted(read(source, "--rows", *SCORED), processes, None)
    cells = [cell for cell in cells if cell.get("cell", "published") == "published"]
    accuracy = load_accuracy() if rows is None else by_source(cells)
    report = score(cells, calibration(), accuracy, load_left_out())
    made = score_tables(report, cells, calibration(), accuracy)
    out = console()
    for table in made:
        if table.name != "cells" and table.rows:
            out.print(rich_table(table))
            out.print()
    for table in made if tables else ():
        table.write(tables or Path())
    _verdict(out, report)


def _verdict(out: Console, report: Report) -> None:
    out.print(plain(READ))
    for check in report.failed:
        out.print(plain(f"FAIL: {check.group}: {check.statistic} past accepted"))
    if report.failed:
        raise typer.Exit(1)
    promised = any(group.checks for group in report.groups)
    kept = "every promise is kept within `accepted`"
    out.print(plain(kept if promised else "nothing is promised about these rows"))
