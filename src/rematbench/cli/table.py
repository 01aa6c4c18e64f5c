"""The command `table`: single tables of the paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.targets import need_folder
from rematbench.host.console import CommandError, align_left, console, grid, plain, rich_table
from rematbench.paper.catalog import PAPER, TableFile, maker, table_files


def table(
    names: Annotated[
        list[str] | None, Argument(metavar="[NAME..]", help="Names of tables (see --list).")
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Folder to write to (default: results/SUITE/tables).",
        ),
    ] = None,
    suite: Annotated[str, Option(help="Suite, for tables that exist for every suite.")] = PAPER,
    given: Annotated[
        list[str] | None,
        Option(
            "--input",
            metavar="NAME=PATH",
            help="Use this file or folder for an input (repeatable).",
        ),
    ] = None,
    show: Annotated[bool, Option("--show", help="Also print the tables.")] = False,
    every: Annotated[bool, Option("--list", help="List all tables with their inputs.")] = False,
) -> None:
    """Make tables: a CSV of raw values, and JSON (for the page), Markdown and LaTeX.

    Each table has a file in src/rematbench/paper/tables, whose INPUTS are paths of its inputs,
    relative to the checkout.  `snakemake --cores 1 results/paper/tables/NAME.csv` creates the
    inputs too.

    \b
    Example:
      rematbench table --list
      rematbench table searched_layouts -o tables
    """
    if every:
        _list()
        return
    if not names:
        raise CommandError("give the NAME of a table, or use --list")
    files = dict.fromkeys(maker(name).name for name in names)
    folder = output or Path("results") / suite / "tables"
    need_folder("-o", folder)
    for file in files:
        own = [name for name in names if maker(name).name == file]
        inputs = _inputs(table_files()[file], given or ())
        for made in table_files()[file].write(own, folder, suite, inputs):
            if show:
                console().print(rich_table(made.printed()))
            typer.echo(f"{folder / made.name}.csv: {len(made.rows)} rows")


def _inputs(file: TableFile, given: Sequence[str]) -> dict[str, list[str]]:
    """The paths of `--input NAME=PATH` by name; CommandError if the file has no such input."""
    named: dict[str, list[str]] = {}
    for name, _, path in (word.partition("=") for word in given):
        if name not in file.inputs:
            raise CommandError(f"--input {name}: {file.name}.py has only {', '.join(file.inputs)}")
        named.setdefault(name, []).append(path)
    return named


def _list() -> None:
    shown = align_left(grid("table", "file", "inputs"), 1, 2)
    for file in table_files().values():
        for name in file.names:
            shown.add_row(name, f"{file.name}.py", plain(" ".join(file.inputs.values())))
    console().print(shown)
