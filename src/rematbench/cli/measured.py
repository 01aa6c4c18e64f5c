"""Commands that make records of the executed and traced worlds: cells of a suite, loss curves."""

from typing import Annotated, Literal

import typer
from typer import Option

from rematbench.cli.options import Timeout
from rematbench.cli.real import as_committed, need_torch
from rematbench.cli.targets import Compare, Methods, Only, Output, SuiteFile, need_folder
from rematbench.host.console import CommandError
from rematbench.worlds import executed, traced, trained
from rematbench.worlds.records.record import keep_record
from rematbench.worlds.records.suite import load_suite
from rematbench.worlds.records.suite_cells import cells


def measure(
    suite: SuiteFile,
    output: Output,
    world: Annotated[Literal["executed", "traced"], Option(help="Run it, or trace a rank.")],
    only: Only = None,
    methods: Methods = None,
    compare: Compare = None,
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


def converge(
    suite: SuiteFile,
    output: Output,
    steps: Annotated[int, Option(min=2, help="Optimizer steps.")] = 240,
    only: Only = None,
    compare: Compare = None,
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
    found, left_out = trained.select_cells(cells(load_suite(suite), [], only or []))
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
