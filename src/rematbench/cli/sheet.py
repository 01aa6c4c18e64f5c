"""The command `predict`: a prediction for every row of a sheet."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.targets import (
    Methods,
    need_file,
)
from rematbench.evidence.predict import predict_rows, prediction_columns
from rematbench.evidence.published.derived import all_cells, bundles
from rematbench.evidence.published.row_cases import ASSUMED
from rematbench.evidence.published.sheets import Cell, read_cells
from rematbench.host.console import CommandError, progress_bar
from rematbench.host.table import write_sheet
from rematbench.host.workers import collect_rarely
from rematbench.inputs.configfile import closest, require_among
from rematbench.inputs.constants import instant_hosts as instant
from rematbench.inputs.load import calibration, load_system, names
from rematbench.plugins.discover import discover

ROWS = Annotated[
    Path, Argument(metavar="ROWS.csv", help="A sheet like the one that `examples` writes.")
]
PROCESSES = Annotated[int, Option(min=1, help="Worker processes.")]
PREDICTED = ("ok", "oom")
NAMED = 3
"""Maximum number of rows without a prediction that the terminal lists."""


def predict(
    rows: ROWS,
    output: Annotated[Path, Option("-o", "--output", metavar="PRED.csv")],
    processes: PROCESSES = 2,
    methods: Methods = None,
    system: Annotated[
        str, Option(metavar="Y", help="Use this stack for every row; replaces the column `system`.")
    ] = "",
    instant_hosts: Annotated[
        bool, Option("--instant-hosts", help="Assume that launching a kernel takes no time.")
    ] = False,
    only: Annotated[
        list[str] | None,
        Option(
            metavar="COLUMN=VALUE",
            help="Predict only rows with this value in the column (repeatable).",
        ),
    ] = None,
    bundle: Annotated[
        str,
        Option(
            metavar="M", help="Predict the published cells with the plans of M (a method or a+b)."
        ),
    ] = "",
) -> None:
    """Predict every row of a sheet and add pred_* columns.

    An empty offload_fraction means the smallest that fits; an empty dp follows from gpus, tp, cp
    and pp.  A row that cannot be predicted gets a pred_status and a pred_reason.

    \b
    Example:
      rematbench examples .
      rematbench predict sheet.csv -o predictions.csv
    """
    need_file("-o", output)
    collect_rarely()
    sheet = read_cells(rows, "ROWS.csv")
    for wanted in only or ():
        column, _, value = wanted.partition("=")
        if column not in sheet.columns:
            near = closest(column, sheet.columns)
            raise CommandError(f"--only {wanted}: no column {column!r}{near}")
        sheet[:] = [row for row in sheet if row[column] == value]
    columns = sheet.columns
    if bundle:
        by_name = bundles(all_cells(sheet), discover(methods or ()))
        require_among([bundle], tuple(by_name), ("", "--bundle", "bundle"))
        sheet[:], columns = by_name[bundle], (*columns, "cell")
    if system:
        load_system(system)
        for row in sheet:
            row["system"] = system
    constants = instant(calibration()) if instant_hosts else None
    with progress_bar("predicting") as advance:
        found = predict_rows(
            sheet,
            processes=processes,
            methods=methods or (),
            progress=advance,
            constants=constants,
        )
    write_sheet(output, found, [*columns, *prediction_columns(found)])
    counts: dict[str, int] = {}
    for row in found:
        counts[row["pred_status"]] = counts.get(row["pred_status"], 0) + 1
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    typer.echo(f"{output}: {len(found)} rows ({summary or 'the sheet is empty'})")
    for line in failure_lines(found):
        typer.echo(line)
    for name in dict.fromkeys(row["model"] for row in found if ASSUMED in row["pred_reason"]):
        near = closest(name, names("model"))
        typer.echo(
            f"unknown model {name!r}{near}: its shapes come from the row, and all "
            "else from a similar model (see column pred_reason)"
        )


def failure_lines(rows: list[Cell]) -> list[str]:
    """Lines that name the first NAMED rows without a prediction, with the reasons."""
    missed = [(n, row) for n, row in enumerate(rows, 1) if row["pred_status"] not in PREDICTED]
    lines = [f"row {n}: {row['pred_status']}: {row['pred_reason']}" for n, row in missed[:NAMED]]
    more = len(missed) - len(lines)
    return lines + ([f"and {more} more rows (see column pred_reason)"] if more else [])
