"""`retrace`: one committed traced cell, traced again where torch is installed."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.targets import need_file
from rematbench.runs.cell import only_cell
from rematbench.runs.store import write_atomically
from rematbench.worlds import traced
from rematbench.worlds.again import verify


def retrace(
    suite: Annotated[Path, Argument(metavar="SUITE.yaml", help="The suite of the traced grid.")],
    cell: Annotated[str, Argument(metavar="PROBLEM.METHOD.NUMBER", help="The record's name.")],
    committed: Annotated[Path, Option(metavar="DIR", help="Folder of the committed records.")],
    output: Annotated[Path, Option("-o", "--output", metavar="FILE", help="One line: what was.")],
) -> None:
    """Trace one cell again and compare it with its committed record; exit code 1 if it differs.

    Without torch nothing is traced, and the line says so.

    \b
    Example:
      rematbench retrace config/traced.yaml llama-65b-figure7.keep_all.0
        --committed results/measured/traced -o build/retraced.txt
    """
    need_file("-o", output)
    if importlib.util.find_spec("torch") is None:
        line = "Nothing was traced again: torch is not installed (`./bench test` always does)."
    else:
        asked = only_cell(suite, cell)
        path = committed / f"{cell}.json"
        ((_, record, lines),) = verify([path], lambda _, old: traced.again(old, asked))
        for line in lines:
            typer.echo(f"{cell}: {line}", err=True)
        if lines:
            raise typer.Exit(1)
        line = f"Traced again: {cell}, with torch {record.provenance.torch}, as committed."
    write_atomically(output, f"{line}\n".encode())
    typer.echo(line)
