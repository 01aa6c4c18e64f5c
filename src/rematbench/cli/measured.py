"""The grids of the executed and traced worlds: `measure` fills results/measured, `worlds` makes
the table from its records (no torch needed)."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from rematbench.cli.options import Timeout
from rematbench.cli.real import as_committed, need_torch
from rematbench.cli.targets import need_folder
from rematbench.host.console import CommandError
from rematbench.runs.cell import cells
from rematbench.runs.collect import read_records
from rematbench.runs.record import keep_record
from rematbench.runs.suite import load_suite
from rematbench.tables.worlds import differing, has_its_own_table, worlds_table
from rematbench.worlds import executed, traced


def measure(
    suite: Annotated[Path, Argument(metavar="SUITE.yaml", help="Problems and methods.")],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where to write.")],
    world: Annotated[Literal["executed", "traced"], Option(help="Run it, or trace a rank.")],
    only: Annotated[
        list[str] | None, Option(metavar="PROBLEM[.METHOD]", help="Some cells (repeatable).")
    ] = None,
    methods: Annotated[
        list[Path] | None, Option("--methods", metavar="DIR", help="More method files.")
    ] = None,
    compare: Annotated[
        Path | None, Option(metavar="DIR", help="Exit 1 if a record is not as its namesake here.")
    ] = None,
    timeout: Timeout = 300,
) -> None:
    """Measure the cells of a suite in the executed or traced world; a record each.

    A record that says the same as before keeps its date, so that a second run changes no file.

    \b
    Example:
      rematbench measure config/traced.yaml --world traced -o results/measured/traced
        --only llama-65b-figure7.keep_all
    """
    need_torch()
    need_folder("-o", output)
    found = cells(load_suite(suite), methods or [], only or [])
    if not found:
        raise CommandError(f"--only {', '.join(only or [])}: no such cell in {suite}")
    if world == "traced":
        for cell in found:
            keep_record(traced.run(cell), output, cell.name)
    else:
        for cell, record in executed.run_cells(found, timeout):
            keep_record(record, output, cell.name)
    typer.echo(f"{output}: {len(found)} records")
    if compare and not as_committed([cell.name for cell in found], output, compare):
        raise typer.Exit(1)


def worlds(
    records: Annotated[list[Path], Argument(metavar="DIR...", help="Folders of records.")],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where to write.")],
    again: Annotated[
        Path | None, Option(metavar="FILE", help="What `retrace` says; goes into the note.")
    ] = None,
) -> None:
    """The table method x layout: lossless? bytes simulated, executed and traced.

    \b
    Example:
      rematbench worlds results/measured -o results/paper/tables
    """
    need_folder("-o", output)
    found = [entry for entry in read_records(records) if not has_its_own_table(entry[1])]
    if not any(record.measured for _, record in found):
        raise CommandError(f"no measured record below {', '.join(map(str, records))}")
    table = worlds_table(found, again.read_text(encoding="utf-8").strip() if again else "")
    table.write(output)
    wrong = differing(found)
    typer.echo(f"{output / table.name}.md: {len(table.rows)} rows, {len(wrong)} break a law")
    for line in wrong:
        typer.echo(line, err=True)
    if wrong:
        raise typer.Exit(1)
