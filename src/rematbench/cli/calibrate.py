"""The commands `calibrate`, which fits the constants, and `validate`, which scores predictions."""

from math import fsum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from rematbench.cli.own_stack import calibrate_own
from rematbench.cli.sheet import PROCESSES, predicted
from rematbench.cli.targets import More, Predictions, need_file, need_folder, read, rich_table
from rematbench.evidence.accuracy import MORE, Report, by_source, left_out_errors, load_accuracy
from rematbench.evidence.accuracy import validate as score
from rematbench.evidence.calibrate import calibrate as fitted
from rematbench.evidence.calibrate import leave_one_out, moved
from rematbench.evidence.fit import FitReport
from rematbench.evidence.job_evidence import SHEETS, joined, out_of_source
from rematbench.evidence.published.sheets import SCORED, Cell
from rematbench.host.console import CommandError, console, grid, plain
from rematbench.host.table import write_sheet
from rematbench.paper.tables.scores import how_to_read, out_of_source_means, score_tables
from rematbench.spec.constants import Calibration, updated_text
from rematbench.spec.load import calibration
from rematbench.spec.paths import data_dir


def calibrate(
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="FILE", help="Write the outcome as YAML.")
    ] = None,
    rows: Annotated[
        Path | None,
        Option("--rows", metavar="MINE.csv", help="Your rows: 1 to 20, one stack, one cluster."),
    ] = None,
    leave_out: Annotated[
        bool, Option("--leave-one-out", help="Refit without each source and predict its cells.")
    ] = False,
    processes: PROCESSES = 2,
) -> None:
    """Refit the `fitted` constants to the declared FIT rows, from their present values; or, with
    --rows, a stack to its user's own rows (tokens/s/GPU or step_s): a stack file with four scales.

    Minutes of CPU time without --rows.  Nothing is changed without --output; the outcome of a plain
    fit has the form of the shipped constants, that of --leave-one-out (an hour) the form of the
    rows from which every band is learnt.

    \b
    Example:
      rematbench calibrate --rows mine.csv -o mine.yaml
      rematbench calibrate
      rematbench calibrate --leave-one-out -o left_out.csv
    """
    need_file("-o", output)
    if rows is not None:
        if leave_out:
            raise CommandError("--rows and --leave-one-out: give one of them")
        calibrate_own(rows, output, processes)
        return
    start = calibration()
    sheets = {name: read(data_dir("published") / name, name) for name in SHEETS}
    if leave_out:
        lines = leave_one_out(sheets, start, load_accuracy(), processes)
        if output is not None:
            write_sheet(output, lines)
        made = [joined(line, sheets) for line in lines]
        errors = left_out_errors(made, load_accuracy(), start)
        for name, error in errors.items():
            typer.echo(f"{name}: {100 * error:.1f} % with constants that never saw the source")
        typer.echo(out_of_source_means(errors, made))
        return
    report = fitted([row for name in SHEETS for row in sheets[name]], start, processes)
    _show(start, report)
    if output is not None:
        shipped = (data_dir("config") / "calibration.yaml").read_text(encoding="utf-8")
        output.write_text(updated_text(shipped, report.calibration), encoding="utf-8")
        typer.echo(f"{output}: written")


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
