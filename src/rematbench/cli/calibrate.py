"""The command `calibrate`, which fits the constants, or a user's stack to the user's rows."""

import math
from collections.abc import Sequence
from math import fsum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from msgspec import ValidationError, convert
from typer import Option

from rematbench.cli.sheet import PROCESSES
from rematbench.cli.targets import need_file
from rematbench.evidence.accuracy import left_out_errors, load_accuracy, ratio_error
from rematbench.evidence.calibrate import SCALES, leave_one_out, left_out_bytes, moved, tangents
from rematbench.evidence.calibrate import calibrate as fitted
from rematbench.evidence.expert_pace import fitted_pace, left_out_experts
from rematbench.evidence.fit import FitReport
from rematbench.evidence.job_evidence import PEAK, SHEETS, joined
from rematbench.evidence.peaks import of_sources
from rematbench.evidence.predict import predict_rows
from rematbench.evidence.published.sheets import SPEED, Cell, read_cells
from rematbench.evidence.user_fit import (
    COUNTS,
    Array,
    band_after,
    band_of_rows,
    leave_one_out_errors,
    measured,
    prior,
    refusals,
    solved,
    suspects,
)
from rematbench.host.console import CommandError, console, grid, percent, plain
from rematbench.host.table import write_sheet
from rematbench.inputs.constants import Calibration, updated_text
from rematbench.inputs.load import calibration, claim_of_row, load_system, located, names
from rematbench.inputs.paths import data_dir
from rematbench.inputs.system import Scales
from rematbench.paper.tables.scores import out_of_source_means


def calibrate(
    output: Annotated[
        Path | None,
        Option("-o", "--output", metavar="FILE", help="Write the result to this YAML file."),
    ] = None,
    rows: Annotated[
        Path | None,
        Option(
            "--rows",
            metavar="MINE.csv",
            help="A sheet with 1 to 20 measured rows of one stack on one cluster.",
        ),
    ] = None,
    leave_out: Annotated[
        bool,
        Option(
            "--leave-one-out", help="For each source: refit without it, then predict its cells."
        ),
    ] = False,
    experts: Annotated[
        bool,
        Option(
            "--experts", help="Fit only the pace at which the host issues the launches of experts."
        ),
    ] = False,
    nbytes: Annotated[
        bool,
        Option("--bytes", help="Compare published with predicted device bytes; nothing is fitted."),
    ] = False,
    force: Annotated[
        bool,
        Option("--force", help="With --rows: write a stack even if its band is wider than 50 %."),
    ] = False,
    processes: PROCESSES = 2,
) -> None:
    """Refit the `fitted` constants to the declared FIT rows, from their present values.  With
    --rows, fit four scales of a stack to your rows (tokens/s/GPU or step_s), and write a stack
    file.

    This takes minutes of CPU time without --rows, an hour with --leave-one-out.  Files change only
    with --output: it has the form of config/calibration.yaml or, with --leave-one-out, of
    config/left_out.csv, from which all bands are computed (with --experts: of
    config/left_out_experts.csv, with --bytes: of config/left_out_bytes.csv).

    \b
    Example:
      rematbench calibrate --rows mine.csv -o mine.yaml
      rematbench calibrate
      rematbench calibrate --leave-one-out -o left_out.csv
    """
    need_file("-o", output)
    if rows is not None:
        if leave_out:
            raise CommandError("--rows and --leave-one-out: give only one of these options")
        calibrate_user_stack(rows, output, processes, force=force)
        return
    start = calibration()
    if nbytes or experts:
        lines = _bytes(processes) if nbytes else _experts(start, processes)
        if output is not None:
            write_sheet(output, lines)
        return
    sheets = {name: read_cells(data_dir("published") / name, name) for name in SHEETS}
    if leave_out:
        lines = leave_one_out(sheets, start, load_accuracy(), processes)
        if output is not None:
            write_sheet(output, lines)
        made = [joined(line, sheets) for line in lines]
        errors = left_out_errors(made, load_accuracy(), start)
        for name, error in errors.items():
            typer.echo(
                f"{name}: error {100 * error:.1f} % with constants fitted without this source"
            )
        typer.echo(out_of_source_means(errors, made))
        return
    report = fitted([row for name in SHEETS for row in sheets[name]], start, processes)
    _show_fit(start, report)
    if output is not None:
        shipped = (data_dir("config") / "calibration.yaml").read_text(encoding="utf-8")
        output.write_text(updated_text(shipped, report.calibration), encoding="utf-8")
        typer.echo(f"{output}: written")


def _bytes(processes: int) -> list[Cell]:
    lines = left_out_bytes(processes)
    typer.echo("\n".join(of_sources(lines)))
    return lines


def _experts(start: Calibration, processes: int) -> list[Cell]:
    pace = fitted_pace(start, start.fit_experts, processes)
    typer.echo(f"expert_pace: {pace:.4g} (shipped: {start.common.expert_pace:.4g})")
    return left_out_experts(start, processes)


def _show_fit(start: Calibration, report: FitReport) -> None:
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


# -- a user's stack -------------------------------------------------------------------------------

MOST_ROWS = 20
"""The most rows of a calibration; with more rows, constants can be refitted instead."""
LOGGED = {"source": "mine", "status": "ok"}
"""Columns that only scoring needs, with the values that they get if a user's sheet lacks them."""
SUFFIXES = (".yaml", ".yml")


WIDEST = 0.5
"""Half-width of a band above which a stack file is written only with --force."""


def calibrate_user_stack(
    path: Path, output: Path | None, processes: int, *, force: bool = False
) -> None:
    """Fit the scales to the rows of a sheet, print scales and errors, write the stack file.
    CommandError instead of a file if the band is wider than WIDEST, unless `force`."""
    if output is not None and output.suffix not in SUFFIXES:
        raise CommandError(
            f"-o {output}: the name of a stack file must end in {' or '.join(SUFFIXES)}"
        )
    constants, before = calibration(), prior()
    rows = [{**row, **tangents(row, constants)} for row in timed_rows(path, processes)]
    if wrong := refusals(rows, before):
        raise CommandError(f"{path}: {'; '.join(wrong)}")
    data = measured(rows)
    theta, covariance = solved(data, before)
    half_width = band_of_rows(data, theta, before)
    out = console()
    table = grid("scale", "factor", "+-", title="Fitted scales (factors on seconds)")
    for name, log, variance in zip(SCALES, theta, covariance.diagonal(), strict=True):
        table.add_row(name, f"{math.exp(log):.3f}", percent(math.sqrt(variance)))
    out.print(table)
    left = (
        _percents(leave_one_out_errors(data, before))
        if len(rows) > 1
        else "not possible with a single row"
    )
    wide = (
        f"+-{percent(half_width)} (in the logarithm of the speed), from errors "
        f"{_learnt(rows, half_width)}"
    )
    errors = {line: ratio_error(row, PEAK) for line, row in enumerate(rows, start=1)}
    told = [f"row {line} {error:+.1%}" for line, error in errors.items() if error is not None]
    for line in (
        f"error before calibration: {_percents(data.errors)}",
        f"error after calibration: {_percents(data.left(theta))}",
        f"error of each row when fitted without it: {left}",
        f"80 % band of the calibrated stack: {wide}",
        *([f"peak bytes, predicted against measured (not fitted): {', '.join(told)}"] * bool(told)),
        *(f"WARNING: {line}" for line in suspects(data, theta, before)),
    ):
        out.print(plain(line))
    if output is not None:
        if half_width > WIDEST and not force:
            raise CommandError(
                f"{output}: not written: the calibrated stack has a band of +-{percent(half_width)}"
                f"; above {percent(WIDEST)} check the rows for mistakes, or add --force"
            )
        output.write_text(stack_file(rows, theta, half_width, path, output), encoding="utf-8")
        out.print(
            plain(f"{output}: written; use it with --system, or in the column `system` of a sheet")
        )


def timed_rows(path: Path, processes: int) -> list[dict[str, Any]]:
    """The sheet's rows with their predictions, all of one stack on one cluster.  A row may give its
    step time (`step_s`) instead of tokens/s/GPU.  CommandError for a row that has neither, or that
    cannot be predicted."""
    sheet = [{**LOGGED, **row} for row in read_cells(path, "--rows", checked=True)]
    if not 1 <= len(sheet) <= MOST_ROWS:
        raise CommandError(
            f"{path}: the sheet has {len(sheet)} rows; a calibration needs 1 to {MOST_ROWS}"
        )
    stacks = {claim_of_row(row["system"], row.get("note", ""))[0] for row in sheet}
    for column, known in (("system", stacks), ("cluster", {row["cluster"] for row in sheet})):
        if len(several := sorted(known)) > 1:
            raise CommandError(
                f"{path}: column {column}: all rows need the same value, not {', '.join(several)}"
            )
    found = []
    for line, row in enumerate(predict_rows(sheet, processes=processes), start=1):
        if row["pred_tokens_per_s_per_gpu"] == "":
            raise CommandError(f"{path}: row {line}: {row['pred_reason'] or row['pred_status']}")
        if not row.get(SPEED):
            problem = f"needs {SPEED} or step_s, a number above 0"
            raise CommandError(f"{path}: row {line}: {problem}")
        found.append(row)
    return found


def _learnt(rows: Sequence[dict[str, Any]], half_width: float) -> str:
    """The rows or stacks whose errors gave the band its half-width, in words."""
    if half_width > band_after(len(rows)):
        return f"of these rows{', each left out of its fit' if len(rows) > 1 else ' after the fit'}"
    known = max(count for count in COUNTS if count <= len(rows))
    more = (
        "" if known == len(rows) else f" (the largest tried number of rows below your {len(rows)})"
    )
    return f"of published stacks after a calibration on {known} row{'s' * (known > 1)} each{more}"


def _percents(errors: Sequence[float] | Array) -> str:
    return ", ".join(f"{100 * math.expm1(error):+.1f} %" for error in map(float, errors))


def stack_file(
    rows: Sequence[dict[str, Any]], theta: Array, half_width: float, path: Path, output: Path
) -> str:
    """The YAML of the calibrated stack: the facts and constants of its base, and the scales.  Log
    scales are relative to the scales of the base, under which the rows were predicted.
    CommandError where a scale is beyond what a stack file may hold."""
    base = claim_of_row(rows[0]["system"], str(rows[0].get("note", "")))[0]
    found, before = located("system", base).resolve(), load_system(base).scales
    if found == output.resolve():
        raise CommandError(
            f"-o {output}: the rows use this stack file; write the new stack to another file"
        )
    moved = {name: math.exp(log) for name, log in zip(SCALES, theta, strict=True)}
    scales = {name: round(getattr(before, name) * by, 4) for name, by in moved.items()}
    try:
        convert(scales, Scales)
    except ValidationError as error:
        raise CommandError(
            f"{path}: the fitted scales are outside the range of a stack file ({error}): {scales}"
        ) from error
    # A stack as a file's `base`: the name of a shipped stack, or else the whole path of the file,
    # which is valid from any folder.
    shipped = found.stem in names("system") and located("system", found.stem).resolve() == found
    own: dict[str, Any] = {
        "name": output.stem,
        "version": "1",
        "base": found.stem if shipped else str(found),
        "scales": {
            "value": {**scales, "half_width": round(half_width, 4)},
            "source": f"fitted to {path.name}, {len(rows)} rows",
        },
    }
    return yaml.safe_dump(own, sort_keys=False)
