"""Inputs and outputs of commands: shared options, sheets, and checks before the work that outputs
can be written."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from rich.table import Table as RichTable
from typer import Argument, Option

from rematbench.evidence.published.sheets import (
    CONFIGURATION,
    SCORED,
    Sheet,
    check_numbers,
    read_sheet,
)
from rematbench.host.console import CommandError, align_left, grid, plain
from rematbench.host.table import Table, repeats
from rematbench.spec.configfile import ConfigError

Output = Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where to write.")]
SuiteFile = Annotated[Path, Argument(metavar="SUITE.yaml", help="Problems and methods.")]
Methods = Annotated[
    list[Path] | None, Option("--methods", metavar="DIR", help="More method files (repeatable).")
]
Only = Annotated[
    list[str] | None, Option(metavar="PROBLEM[.METHOD]", help="Some cells (repeatable).")
]
Compare = Annotated[
    Path | None, Option(metavar="DIR", help="Exit 1 if a record is not as its namesake here.")
]
Records = Annotated[list[Path], Argument(metavar="DIR...", help="Folders of records.")]
Predictions = Annotated[Path | None, Option(metavar="PRED.csv", help="Rows already predicted.")]
More = Annotated[
    Path | None, Option(metavar="PRED.csv", help="Rows of runs_more.csv already predicted.")
]
Out = Annotated[Path | None, Option(metavar="RECORD.json", help="Also write the record.")]
Json = Annotated[bool, Option("--json", help="Print the answer as JSON.")]


def need_folder(option: str, folder: Path) -> None:
    """Create a folder; CommandError if files cannot be written there."""
    _need(option, folder, folder)


def need_file(option: str, path: Path | None) -> None:
    """CommandError if an output file cannot be written, or its folder does not exist: a misspelt
    path must create no folders."""
    if path is None:
        return
    if path.is_dir():
        raise CommandError(f"{option} {path}: cannot be written (Is a directory)")
    if not path.parent.exists():
        raise CommandError(f"{option} {path}: cannot be written (no folder {path.parent})")
    _need(option, path, path.parent)


def _need(option: str, target: Path, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"{option} {target}: cannot be written ({folder} is not a folder)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(f"{option} {target}: cannot be written ({error.strerror})") from error


def rich_table(table: Table) -> RichTable:
    """A table for the terminal, with the same cells as its Markdown."""
    heads = [column.heading for column in table.headed]
    words = [
        index
        for index, column in enumerate(table.headed)
        if all(isinstance(row.get(column.key), str) for row in table.rows)
    ]
    shown = align_left(grid(*heads, title=table.title), *words)
    above: tuple[str, ...] = ()
    for row in table.texts():
        told = ('"' if repeats(row, above, at) else text for at, text in enumerate(row))
        shown.add_row(*(plain(text) for text in told))
        above = row
    return shown


def read(
    path: Path,
    option: str,
    *needed: str,
    columns: Iterable[str] = CONFIGURATION,
    checked: bool = False,
) -> Sheet:
    """A sheet with the columns `columns` and, of published or predicted cells, the columns
    `needed`; CommandError with the option's name if one is missing or (with `needed`, or `checked`)
    a number is wrong."""
    try:
        sheet = read_sheet(path, dict.fromkeys([*columns, *(SCORED if needed else ()), *needed]))
        if needed or checked:
            check_numbers(sheet, str(path))
    except ConfigError as error:
        raise CommandError(f"{option}: {error}") from error
    return sheet
