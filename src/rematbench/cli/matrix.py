"""The command `matrix`: the grand matrix, simulated."""

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.targets import need_file
from rematbench.evidence.published.sheets import read_sheet
from rematbench.host.table import write_sheet
from rematbench.paper.matrix.best import ANSWERED
from rematbench.paper.matrix.spec import load_matrix
from rematbench.paper.matrix.sweep import run_matrix
from rematbench.plugins.discover import discover

SUITE = Annotated[Path, Argument(metavar="SUITE.yaml", help="Suite file that declares a matrix.")]


def matrix(
    suite: SUITE,
    output: Annotated[Path, Option("-o", "--output", metavar="FILE.csv", help="Results.")],
    cells: Annotated[
        Path | None,
        Option(
            metavar="CELLS.csv",
            help="Results of `searches cells`; cells without a result are searched.",
        ),
    ] = None,
    model: Annotated[list[str] | None, Option(help="Only this model (repeatable).")] = None,
    seq_len: Annotated[list[int] | None, Option(help="Only this length (repeatable).")] = None,
) -> None:
    """Simulate the grand matrix: every arm at one layout and at its best layout, and the fastest
    plan of all.

    \b
    Example:
      rematbench matrix config/paper.yaml --cells results/searched/cells.csv --model llama3-8b
        -o results/paper/matrix/llama3-8b.csv
    """
    need_file("-o", output)
    spec, registry = load_matrix(suite).restricted(model or (), seq_len or ()), discover()
    answers = read_sheet(cells, ANSWERED) if cells else []
    lines = []
    began = time.process_time()
    for found in run_matrix(spec, registry, answers):
        lines += found
        at = f"{found[0]['model']} {found[0]['cluster']} {found[0]['seq_len']}"
        typer.echo(f"{at}: {time.process_time() - began:.0f} CPU s so far", err=True)
    write_sheet(output, lines)
    typer.echo(f"{output}: {len(lines)} results")
