"""Long training runs on real text: each method's loss curve beside keep_all's."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.real import as_committed, need_torch
from rematbench.cli.targets import need_folder
from rematbench.host.console import CommandError
from rematbench.plugins.registry import IDENTITY
from rematbench.published.sheets import write_sheet
from rematbench.runs.cell import cells
from rematbench.runs.collect import read_records
from rematbench.runs.record import keep_record
from rematbench.runs.suite import load_suite
from rematbench.tables.curves import curve_lines, curves_table
from rematbench.worlds import trained


def converge(
    suite: Annotated[Path, Argument(metavar="SUITE.yaml", help="Problems and methods.")],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where to write.")],
    steps: Annotated[int, Option(min=2, help="Optimizer steps.")] = 240,
    only: Annotated[
        list[str] | None, Option(metavar="PROBLEM.METHOD", help="Some cells (repeatable).")
    ] = None,
    compare: Annotated[
        Path | None, Option(metavar="DIR", help="Exit 1 if a curve is not as its namesake here.")
    ] = None,
) -> None:
    """Train a suite's model on the Python standard library's sources; a record per method.

    keep_all is trained on every problem, every other method on the first one on which it does
    something; a line for each problem says what is left out there, and why.

    \b
    Example:
      rematbench converge config/convergence.yaml -o results/measured/convergence
    """
    need_torch()
    need_folder("-o", output)
    found, left_out = trained.chosen(cells(load_suite(suite), [], only or []))
    for line in left_out:
        typer.echo(line)
    if not found:
        words = ", ".join(only or [])
        raise CommandError(f"--only {words}: no such cell in {suite} has a plan of its own")
    for cell in found:
        record = trained.run(cell, steps)
        keep_record(record, output, cell.name)
        last = record.measured.losses[-1:] if record.measured else ()
        typer.echo(f"{cell.name}: {record.status} {' '.join(map(str, last))}".rstrip())
    names = [cell.name for cell in found]
    if compare and not as_committed(names, output, compare):
        raise typer.Exit(1)


def curves(
    records: Annotated[Path, Argument(metavar="DIR", help="Records of `converge`.")],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where to write.")],
) -> None:
    """Loss curves (convergence.csv) and the table of their deviations from keep_all's.

    \b
    Example:
      rematbench curves results/measured/convergence -o results/paper/tables
    """
    need_folder("-o", output)
    found = [(problem, record) for problem, record in read_records([records]) if record.measured]
    bases = {problem: r for problem, r in found if r.spec.method == IDENTITY}
    alone = sorted({problem for problem, _ in found} - set(bases))
    if alone or not bases:
        of = f" on {', '.join(alone)}" if alone else ""
        raise CommandError(f"{records}: no record of {IDENTITY}{of} to compare with")
    write_sheet(output / "convergence.csv", curve_lines(found, bases))
    curves_table(found, bases).write(output)
    typer.echo(f"{output}: {len(found)} curves")
