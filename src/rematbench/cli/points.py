"""The commands about committed runs of baselines: traced points and the agreement of engines,
traced or run again, and their tables."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.real import as_committed, gpus_here, need_gpu, need_torch
from rematbench.cli.targets import Output, need_folder
from rematbench.host.console import CommandError
from rematbench.paper.studies.baseline_points import Point, load_points, trace_points
from rematbench.paper.tables.baselines import points_table, tensors_table
from rematbench.worlds import package
from rematbench.worlds.agreement import (
    agreement_records,
    agreement_table,
    disagreements,
)
from rematbench.worlds.packages.process import Device, NotInstalled
from rematbench.worlds.records.record import keep_record, read_record
from rematbench.worlds.reruns import verify

Names = Annotated[list[str] | None, Argument(metavar="[NAME..]", help="Only these.")]
Committed = Annotated[Path, Option("--compare", metavar="DIR", help="The records to equal.")]


def chosen(names: list[str] | None) -> tuple[Point, ...]:
    """The shipped points, or the named ones; CommandError for an unknown name."""
    points = load_points()
    known = [point.name for point in points]
    for name in names or ():
        if name not in known:
            raise CommandError(f"unknown point {name!r} (known: {', '.join(known)})")
    return tuple(point for point in points if not names or point.name in names)


def trace_shipped_points(output: Output, names: Names = None) -> None:
    """Trace the points of config/baseline_points.yaml; a record each.

    \b
    Example:
      rematbench baseline points k22b-none -o traced/
    """
    need_folder("-o", output)
    points = chosen(names)
    records = trace_points(points, output)
    for point, record in zip(points, records, strict=True):
        typer.echo(f"{point.name}: {record.status} {record.reason}".rstrip())
    if any(record.status != "ok" for record in records):
        raise typer.Exit(1)


def trace_again(output: Output, committed: Committed, names: Names = None) -> None:
    """Trace points again and compare every number with a folder of records.

    Exit code 1 if one differs.  Where the package is not installed one line says so, with exit
    code 0.

    \b
    Example:
      rematbench baseline again k22b-selective -o traced/
        --compare results/measured/traced/baselines
    """
    need_folder("-o", output)
    paths = [committed / f"{point.name}.json" for point in chosen(names)]
    for path in paths:  # before anything is traced
        read_record(path)
    wrong = 0
    for path in paths:
        try:
            record, lines = verify(path, lambda _, old: package.rerun(old))
        except NotInstalled as error:
            typer.echo(f"{path.stem}: not traced again: {error}")
            continue
        keep_record(record, output, path.stem)
        typer.echo(f"{path.stem}: " + ("; ".join(lines) or "traced again, every number equal"))
        wrong += bool(lines)
    if wrong:
        raise typer.Exit(1)


def compare_engines(
    output: Output,
    committed: Annotated[
        Path | None, Option("--compare", metavar="DIR", help="The records to equal.")
    ] = None,
    device: Annotated[Device, Option(help="cuda: the layouts that fit on the GPUs here.")] = "cpu",
) -> None:
    """Run our executor, Megatron-core and DeepSpeed on the same weights and batches; a record each.

    Exit code 1 if losses or gradient norms are further apart than 1e-5 (bf16: 1e-2) or, with
    --compare, if a record is not as its namesake.  A record that says the same as before keeps its
    date.

    \b
    Example:
      rematbench baseline agree -o build/agreement --compare results/measured/executed/agreement
    """
    need_torch()
    need_gpu(device)
    need_folder("-o", output)
    records = dict(agreement_records(device, gpus_here() if device == "cuda" else 0))
    for name, record in records.items():
        keep_record(record, output, name)
    typer.echo(f"{output}: {len(records)} records")
    wrong = disagreements(records)
    for name, why in wrong.items():
        typer.echo(f"{name}: {why}", err=True)
    if wrong:
        raise typer.Exit(1)
    if committed and not as_committed(list(records), output, committed):
        raise typer.Exit(1)


def write_tables(
    records: Annotated[Path, Argument(metavar="DIR", help="Records of traced points.")],
    output: Output,
    agreement: Annotated[
        Path | None, Option(metavar="DIR", help="Records of `agree`, for a table of their own.")
    ] = None,
) -> None:
    """Write the tables of baselines: traced bytes beside predicted and published ones, tensors,
    and how far engines agree.

    \b
    Example:
      rematbench baseline tables results/measured/traced/baselines -o results/paper/tables
    """
    need_folder("-o", output)
    points = load_points()
    tables = [points_table(points, records), tensors_table(points)]
    for table in [*tables, *([agreement_table(agreement)] if agreement else [])]:
        if not table.rows:
            raise CommandError(f"{records}: no record of a point of config/baseline_points.yaml")
        table.write(output)
        typer.echo(f"{output / table.name}.md: {len(table.rows)} rows")
