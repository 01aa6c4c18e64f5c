"""The commands `predict`, a prediction for every row of a sheet, and `validate`, which scores
predictions."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Argument, Option

from rematbench.cli.targets import (
    Methods,
    More,
    Predictions,
    need_file,
    need_folder,
    read,
    rich_table,
)
from rematbench.evidence.accuracy import MORE, Report, by_source, left_out_errors, load_accuracy
from rematbench.evidence.accuracy import validate as score
from rematbench.evidence.job_evidence import out_of_source
from rematbench.evidence.predict import COLUMNS, predict_rows
from rematbench.evidence.published.sheets import ASSUMED, SCORED, Cell
from rematbench.host.console import CommandError, console, plain
from rematbench.host.table import write_sheet
from rematbench.host.workers import collect_rarely
from rematbench.paper.tables.scores import how_to_read, out_of_source_means, score_tables
from rematbench.spec.configfile import closest
from rematbench.spec.constants import Calibration
from rematbench.spec.constants import instant_hosts as instant
from rematbench.spec.load import calibration, load_system, names
from rematbench.spec.paths import data_dir

ROWS = Annotated[Path, Argument(metavar="ROWS.csv", help="Rows as `examples` has.")]
PROCESSES = Annotated[int, Option(min=1, help="Worker processes.")]
PREDICTED = ("ok", "oom")
NAMED = 3
"""Most rows without a prediction that are named on the terminal."""


def predict(
    rows: ROWS,
    output: Annotated[Path, Option("-o", "--output", metavar="PRED.csv")],
    processes: PROCESSES = 2,
    methods: Methods = None,
    system: Annotated[
        str, Option(metavar="Y", help="The stack of every row, whatever its column says.")
    ] = "",
    instant_hosts: Annotated[
        bool, Option("--instant-hosts", help="As if hosts issued everything at once.")
    ] = False,
    only: Annotated[
        list[str] | None,
        Option(metavar="COLUMN=VALUE", help="Rows with this value alone (repeatable)."),
    ] = None,
) -> None:
    """Predict every row of a sheet; adds pred_* columns, drops no row that is asked for.

    An empty offload_fraction means the smallest that fits; an empty dp is what gpus, tp, cp and pp
    leave.  A row that cannot be predicted gets a pred_status and a pred_reason.

    \b
    Example:
      rematbench examples .
      rematbench predict sheet.csv -o predictions.csv
    """
    need_file("-o", output)
    collect_rarely()
    sheet = read(rows, "ROWS.csv")
    for wanted in only or ():
        column, _, value = wanted.partition("=")
        if column not in sheet.columns:
            near = closest(column, sheet.columns)
            raise CommandError(f"--only {wanted}: no column {column!r}{near}")
        sheet[:] = [row for row in sheet if row[column] == value]
    if system:
        load_system(system)
        for row in sheet:
            row["system"] = system
    constants = instant(calibration()) if instant_hosts else None
    found = predicted(sheet, processes, methods, constants)
    write_sheet(output, found, [*sheet.columns, *COLUMNS])
    counts: dict[str, int] = {}
    for row in found:
        counts[row["pred_status"]] = counts.get(row["pred_status"], 0) + 1
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    typer.echo(f"{output}: {len(found)} rows ({summary or 'the sheet is empty'})")
    for line in not_predicted(found):
        typer.echo(line)
    for name in dict.fromkeys(row["model"] for row in found if ASSUMED in row["pred_reason"]):
        near = closest(name, names("model"))
        told = "shapes are the row's, the rest is a relative's (pred_reason)"
        typer.echo(f"unknown model {name!r}{near}: {told}")


def not_predicted(rows: list[Cell]) -> list[str]:
    """Lines that name the first NAMED rows without a prediction, with the reasons."""
    missed = [(n, row) for n, row in enumerate(rows, 1) if row["pred_status"] not in PREDICTED]
    lines = [f"row {n}: {row['pred_status']}: {row['pred_reason']}" for n, row in missed[:NAMED]]
    more = len(missed) - len(lines)
    return lines + ([f"and {more} more rows (pred_reason)"] if more else [])


def predicted(
    rows: list[Cell],
    processes: int,
    methods: list[Path] | None,
    constants: Calibration | None = None,
) -> list[Cell]:
    """The rows with their predictions (`predict_rows`), with a progress bar on stderr."""
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

        return predict_rows(
            rows,
            processes=processes,
            methods=methods or (),
            progress=advance,
            constants=constants,
        )


def validate(
    rows: Annotated[
        Path | None, Option("--rows", metavar="MINE.csv", help="Your rows, by source.")
    ] = None,
    predictions: Predictions = None,
    more: More = None,
    tables: Annotated[
        Path | None,
        Option(metavar="DIR", help="Also write the tables."),
    ] = None,
    processes: PROCESSES = 2,
) -> None:
    """Errors of predictions by source, beside a constant-MFU floor; exit 1 past `accepted`.

    Without --rows the published cells are predicted and held to the accuracy that is promised.
    With --predictions the groups of runs_more.csv are scored only where --more is given too.

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
    beside: list[Cell] = []
    if more is not None:
        beside = list(read(more, "--more", *SCORED, "pred_status"))
    elif rows is None and predictions is None:
        sheet = read(data_dir("published") / MORE, "--more", *SCORED)
        beside = predicted(sheet, processes, None)
    cells = [cell for cell in cells if cell.get("cell", "published") == "published"]
    accuracy = load_accuracy() if rows is None else by_source(cells)
    strange = out_of_source() if rows is None else ()
    left_out = left_out_errors(strange, accuracy, calibration())
    report = score(cells, calibration(), accuracy, left_out, beside)
    made = score_tables(report, cells, calibration(), accuracy, strange, beside)
    out = console()
    for table in made:
        if table.name != "cells" and table.rows:
            out.print(rich_table(table))
            out.print()
    for table in made if tables else ():
        table.write(tables or Path())
    out.print(plain(how_to_read(calibration())))
    if left_out and strange:
        out.print(plain(out_of_source_means(left_out, strange)))
    _verdict(out, report)


def _verdict(out: Console, report: Report) -> None:
    for check in report.failed:
        out.print(plain(f"FAIL: {check.group}: {check.statistic} past accepted"))
    if report.failed:
        raise typer.Exit(1)
    promised = any(group.checks for group in report.groups)
    kept = "every promise is kept within `accepted`"
    out.print(plain(kept if promised else "nothing is promised about these rows"))
