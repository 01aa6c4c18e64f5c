"""The command `verify`: repeats the runs of records."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.real import need_torch
from rematbench.cli.targets import Methods, need_folder
from rematbench.plugins.discover import discover
from rematbench.worlds.packages.process import NotInstalled
from rematbench.worlds.records.record import Record, keep_record, read_record
from rematbench.worlds.records.suite_cells import Cell, recorded_cell, single_cell
from rematbench.worlds.reruns import rerun_record
from rematbench.worlds.reruns import verify as verified


def verify(
    records: Annotated[list[Path], Argument(metavar="RECORD...", help="Record files.")],
    suite: Annotated[
        Path | None,
        Option(metavar="SUITE.yaml", help="Suite file that defines the cells of the records."),
    ] = None,
    cluster: Annotated[
        str, Option(metavar="FILE.yaml", help="Cluster file, if the cluster is not a shipped one.")
    ] = "",
    methods: Methods = None,
    output: Annotated[
        Path | None,
        Option("-o", "--output", metavar="DIR", help="Write the new records to this folder."),
    ] = None,
    installed: Annotated[
        bool,
        Option("--if-installed", help="Skip a record if torch or its package is not installed."),
    ] = False,
) -> None:
    """Repeat the runs of records and compare every number.

    Records may be simulated, traced or executed runs, or runs of real packages.  Dates, hosts and
    seconds of a GPU are not compared; losses and gradients may differ by rounding.  Exit code 1 if
    a record differs.  For a cluster that is not shipped, give --cluster or --suite.

    \b
    Example:
      rematbench simulate full_recompute --model llama-7b --cluster a800-80gb --gpus 4
        --seq-len 4096 --global-batch 16 --pp 4 -o run.json
      rematbench verify run.json
    """
    if output is not None:
        need_folder("-o", output)
    if {read_record(path).world for path in records} - {"simulated"}:
        if installed and importlib.util.find_spec("torch") is None:
            typer.echo(f"{', '.join(path.stem for path in records)}: not run again without torch")
            return
        need_torch()
    registry = discover(methods or ())

    def rerun(name: str, record: Record) -> Record:
        def cell() -> Cell:
            if suite is None:
                return recorded_cell(name, record, registry, cluster)
            return single_cell(suite, name, methods or [])

        return rerun_record(record, cell, registry)

    if not all([_verified(path, rerun, output, installed=installed) for path in records]):
        raise typer.Exit(1)


def _verified(
    path: Path, rerun: Callable[[str, Record], Record], output: Path | None, *, installed: bool
) -> bool:
    """Whether a record's run gives the same numbers; True if its package is not installed and
    `installed` allows that."""
    try:
        record, lines = verified(path, rerun)
    except NotInstalled as error:
        if not installed:
            raise
        typer.echo(f"{path.stem}: not run again: {error}")
        return True
    text = "; ".join(lines) or "every number equal"
    typer.echo(f"{path.stem} ({record.world}): {text}")
    if output is not None:
        keep_record(record, output, path.stem)
    return not lines
