"""The commands `verify` (repeats the runs of records) and `retrace` (one cell, for the
workflow)."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.real import need_torch
from rematbench.cli.targets import Methods, need_file, need_folder
from rematbench.host.files import write_atomically
from rematbench.plugins.discover import discover
from rematbench.worlds import traced
from rematbench.worlds.records.record import Record, keep_record, read_record
from rematbench.worlds.records.suite_cells import Cell, recorded_cell, single_cell
from rematbench.worlds.reruns import rerun_record
from rematbench.worlds.reruns import verify as verified


def verify(
    records: Annotated[list[Path], Argument(metavar="RECORD...", help="Record files.")],
    suite: Annotated[
        Path | None, Option(metavar="SUITE.yaml", help="The suite that defines the records' cells.")
    ] = None,
    cluster: Annotated[
        str, Option(metavar="FILE.yaml", help="The cluster file, if it is not shipped.")
    ] = "",
    methods: Methods = None,
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="DIR", help="Keep the new records.")
    ] = None,
) -> None:
    """Repeat the runs of records and compare every number.

    Records may be simulated, traced or executed runs, loss curves and runs of real packages.
    Dates, hosts and seconds of a GPU are not compared; losses and gradients may differ by rounding.
     Exit code 1 if a record differs.  For a cluster that is not shipped, give --cluster or --suite.

    \b
    Example:
      rematbench simulate full_recompute --model llama-7b --cluster a800-80gb --gpus 4
        --seq-len 4096 --global-batch 16 --pp 4 --out run.json
      rematbench verify run.json
    """
    if output is not None:
        need_folder("-o", output)
    if {read_record(path).world for path in records} - {"simulated"}:
        need_torch()
    registry, wrong = discover(methods or ()), 0
    made: dict[tuple[str, str], Record] = {}

    def again(name: str, record: Record) -> Record:
        def cell() -> Cell:
            if suite is None:
                return recorded_cell(name, record, registry, cluster)
            return single_cell(suite, name, methods or [])

        key = (name, record.run_id)  # the curve of keep_all runs once for all comparisons
        if key not in made:
            made[key] = rerun_record(record, cell, registry)
        return made[key]

    for path in records:
        record, lines = verified(path, again)
        text = "; ".join(lines) or "every number equal"
        typer.echo(f"{path.stem} ({record.world}): {text}")
        wrong += bool(lines)
        if output is not None:
            keep_record(record, output, path.stem)
    if wrong:
        raise typer.Exit(1)


def retrace(
    suite: Annotated[Path, Argument(metavar="SUITE.yaml", help="The suite of the traced grid.")],
    cell: Annotated[str, Argument(metavar="PROBLEM.METHOD.NUMBER", help="The record's name.")],
    committed: Annotated[Path, Option(metavar="DIR", help="Folder of the committed records.")],
    output: Annotated[Path, Option("-o", "--output", metavar="FILE", help="The result, one line.")],
) -> None:
    """Trace one cell again and compare it with its committed record; exit code 1 if it differs.

    Without torch nothing is traced, and the result states this.

    \b
    Example:
      rematbench retrace config/traced.yaml llama-65b-figure7.keep_all.0
        --committed results/measured/traced -o retraced.txt
    """
    need_file("-o", output)
    if importlib.util.find_spec("torch") is None:
        line = "Nothing was traced again: torch is not installed (`./bench test` always does)."
    else:
        asked = single_cell(suite, cell)
        path = committed / f"{cell}.json"
        record, lines = verified(path, lambda _, old: traced.rerun(old, asked))
        for line in lines:
            typer.echo(f"{cell}: {line}", err=True)
        if lines:
            raise typer.Exit(1)
        line = f"Traced again: {cell}, with torch {record.provenance.torch}, as committed."
    write_atomically(output, f"{line}\n".encode())
    typer.echo(line)
