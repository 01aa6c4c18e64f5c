"""The commands about sheets of rows: predict and validate."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from typer import Argument, Option

from rematbench.cli.targets import need_file, need_folder
from rematbench.host.console import CommandError, console, grid, left, plain
from rematbench.host.garbage import collect_rarely
from rematbench.published.accuracy import load_accuracy, load_left_out
from rematbench.published.predict import COLUMNS, predict_rows
from rematbench.published.scores import READ, score_tables
from rematbench.published.sheets import (
    CONFIGURATION,
    SCORED,
    Cell,
    Sheet,
    check_numbers,
    read_sheet,
    write_sheet,
)
from rematbench.published.validate import Report, by_source
from rematbench.published.validate import validate as score
from rematbench.spec.configfile import ConfigError
from rematbench.spec.load import calibration
from rematbench.spec.paths import data_dir
from rematbench.tables.table import Table

ROWS = Annotated[Path, Argument(metavar="ROWS.csv", help="Columns as results/published/runs.csv.")]
METHODS = Annotated[
    list[Path] | None, Option("--methods", metavar="DIR", help="More method files (repeatable).")
]
PROCESSES = Annotated[int, Option(min=1, help="Worker processes.")]


def predict(
    rows: ROWS,
    output: Annotated[Path, Option("-o", "--output", metavar="PRED.csv")],
    processes: PROCESSES = 2,
    methods: METHODS = None,
) -> None:
    """Predict every row of a sheet; adds pred_* columns, never drops a row.

    An empty offload_fraction means the smallest that fits.  A row that cannot be predicted gets
    a pred_status and a pred_reason.

    \b
    Example:
      rematbench predict results/published/runs.csv -o predictions.csv
    """
    need_file("-o", output)
    collect_rarely()
    sheet = read(rows, "ROWS.csv")
    found = predicted(sheet, processes, methods)
    write_sheet(output, found, [*sheet.columns, *COLUMNS])
    counts: dict[str, int] = {}
    for row in found:
        counts[row["pred_status"]] = counts.get(row["pred_status"], 0) + 1
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    typer.echo(f"{output}: {len(found)} rows ({summary or 'the sheet is empty'})")


def validate(
    rows: Annotated[
        Path | None, Option("--rows", metavar="MINE.csv", help="Your rows, by source.")
    ] = None,
    predictions: Annotated[
        Path | None, Option(metavar="PRED.csv", help="Rows already predicted.")
    ] = None,
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


def rich_table(table: Table) -> RichTable:
    """A table for the terminal: the same cells as its Markdown."""
    heads = [column.heading for column in table.columns]
    words = [
        index
        for index, column in enumerate(table.columns)
        if all(isinstance(row.get(column.key), str) for row in table.rows)
    ]
    shown = left(grid(*heads, title=table.title), *words)
    for row in table.texts():
        shown.add_row(*(plain(cell) for cell in row))
    return shown


def predicted(rows: list[Cell], processes: int, methods: list[Path] | None) -> list[Cell]:
    """predict_rows with a progress bar on stderr."""
    err = console(error=True)
    columns = (
        TextColumn("predicting"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("predicting", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return predict_rows(rows, processes=processes, methods=methods or (), progress=advance)


def read(path: Path, option: str, *needed: str, columns: Iterable[str] = CONFIGURATION) -> Sheet:
    """A sheet that has `columns`, and the `needed` ones of published or predicted cells;
    CommandError with the option's name."""
    try:
        sheet = read_sheet(path, dict.fromkeys([*columns, *(SCORED if needed else ()), *needed]))
        if needed:
            check_numbers(sheet, str(path))
    except ConfigError as error:
        raise CommandError(f"{option}: {error}") from error
    return sheet
