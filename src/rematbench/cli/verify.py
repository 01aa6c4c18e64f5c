"""`verify`: what records say, run again."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.real import need_torch
from rematbench.cli.targets import Methods, need_folder
from rematbench.plugins.discover import discover
from rematbench.runs.cell import Cell, only_cell, recorded_cell
from rematbench.runs.record import Record, keep_record
from rematbench.worlds.again import verify as verified
from rematbench.worlds.verify import run_again


def verify(
    records: Annotated[list[Path], Argument(metavar="RECORD...", help="Record files.")],
    suite: Annotated[
        Path | None, Option(metavar="SUITE.yaml", help="Cells by the records' names, from here.")
    ] = None,
    cluster: Annotated[str, Option(metavar="FILE.yaml", help="If the runs' was a file.")] = "",
    methods: Methods = None,
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="DIR", help="Keep the new records.")
    ] = None,
) -> None:
    """Run again what records say, in the world that each says, and compare every number.

    Simulated, traced and executed runs, loss curves and real packages.  Dates, hosts and seconds
    of a GPU are not compared; losses and gradients may differ by rounding.  Exit code 1 if a
    record differs.  A spec names its cluster: one that config/ does not have is given by --cluster,
    or with the problem of a suite by --suite.

    \b
    Example:
      rematbench simulate full_recompute --model llama-7b --cluster a800-80gb --gpus 4
        --seq-len 4096 --global-batch 16 --pp 4 --out run.json
      rematbench verify run.json
    """
    if output is not None:
        need_folder("-o", output)
    registry, wrong = discover(methods or ()), 0

    def again(name: str, record: Record) -> Record:
        if record.world != "simulated":
            need_torch()
        return run_again(record, lambda: cell(name, record), registry)

    def cell(name: str, record: Record) -> Cell:
        if suite is None:
            return recorded_cell(name, record, registry, cluster)
        return only_cell(suite, name, methods or [])

    for name, record, lines in verified(records, again):
        typer.echo(f"{name} ({record.world}): " + ("; ".join(lines) or "every number equal"))
        wrong += bool(lines)
        if output is not None:
            keep_record(record, output, name)
    if wrong:
        raise typer.Exit(1)
