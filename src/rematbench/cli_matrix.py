"""The commands of the paper artifact: matrix, matrix-tables, report, expect."""

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli_text import CommandError
from rematbench.discover import discover
from rematbench.matrix import run_matrix
from rematbench.matrix_spec import MatrixSpec
from rematbench.sheets import write_sheet
from rematbench.suitefile import load_suite

SUITE = Annotated[Path, Argument(metavar="SUITE.yaml", help="A suite with a matrix.")]
CANDIDATES = "candidates.csv"


def declared(suite: Path) -> MatrixSpec:
    """The matrix of a suite file."""
    spec = load_suite(suite).matrix
    if spec is None:
        raise CommandError(f"{suite}: declares no matrix")
    return spec


def matrix(
    suite: SUITE,
    output: Annotated[Path, Option("-o", "--output", metavar="FILE.csv", help="Results.")],
    model: Annotated[list[str] | None, Option(help="Only this model (repeatable).")] = None,
) -> None:
    """Simulate the grand matrix: every arm at one layout and at its best layout.

    Beside FILE.csv, FILE.candidates.csv tells what became of every candidate layout.

    \b
    Example:
      rematbench matrix config/paper.yaml --model llama3-8b -o results/paper/matrix/llama3-8b.csv
    """
    spec, registry = declared(suite), discover()
    lines, told = [], []
    began = time.process_time()
    for found, candidates in run_matrix(spec, registry, model or ()):
        lines += found
        told += candidates
        at = f"{found[0]['model']} {found[0]['cluster']} {found[0]['seq_len']}"
        typer.echo(f"{at}: {time.process_time() - began:.0f} CPU s so far", err=True)
    write_sheet(output, lines)
    write_sheet(output.with_suffix(f".{CANDIDATES}"), told)
    typer.echo(f"{output}: {len(lines)} results, {len(told)} candidates")
