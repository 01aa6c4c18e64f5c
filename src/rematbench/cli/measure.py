"""The command `measure`: makes the committed records of the executed and traced worlds again."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from rematbench.cli.options import Timeout
from rematbench.cli.real import as_committed, gpus_here, need_gpu, need_torch
from rematbench.cli.targets import Compare, Methods, Only, Output, need_folder
from rematbench.host.console import CommandError
from rematbench.inputs.configfile import require_among
from rematbench.inputs.paths import data_dir
from rematbench.paper.studies.baseline_points import load_points, trace_points
from rematbench.worlds import executed, traced
from rematbench.worlds.agreement import agreement_records, disagreements
from rematbench.worlds.packages.process import Device
from rematbench.worlds.records.record import Record, keep_record
from rematbench.worlds.records.suite import load_suite
from rematbench.worlds.records.suite_cells import cells

What = Literal["executed", "traced", "points", "agreement"]


def measure(  # every option is a parameter
    what: Annotated[What, Argument(help="The records to make.")],
    output: Output,
    suite: Annotated[
        Path | None,
        Option(metavar="SUITE.yaml", help="Suite to measure (default: config/WHAT.yaml)."),
    ] = None,
    only: Only = None,
    methods: Methods = None,
    compare: Compare = None,
    device: Annotated[
        Device,
        Option(help="For `agreement`: device to run on; cuda runs the cells that fit on its GPUs."),
    ] = "cpu",
    timeout: Timeout = 300,
) -> None:
    """Make committed records again.

    executed: the cells of a suite, in processes on this machine.  traced: one rank of each cell, on
    fake tensors.  points: baselines, traced at the points of config/baseline_points.yaml.
    agreement: our executor, Megatron-core and DeepSpeed on the same weights and batches; their
    losses and gradient norms must agree within 1e-5 (bf16: 1e-2).

    A record that says the same as before keeps its date, so that a second run changes no file.

    \b
    Example:
      rematbench measure traced -o results/measured/traced --only llama-65b-figure7.keep_all
    """
    need_torch()
    need_gpu(device)
    need_folder("-o", output)
    if what == "points":
        names, wrong = _points(output, only or [])
    elif what == "agreement":
        made = dict(agreement_records(device, gpus_here() if device == "cuda" else 0))
        names, wrong = _keep(made.items(), output), disagreements(made)
    else:
        path = suite or data_dir("config") / f"{what}.yaml"
        found = cells(load_suite(path), methods or [], only or [])
        if not found:
            raise CommandError(f"--only {', '.join(only or [])}: no such cell in {path}")
        traces = ((cell, traced.run(cell)) for cell in found)
        runs = executed.run_cells(found, timeout) if what == "executed" else traces
        names, wrong = _keep(((cell.name, record) for cell, record in runs), output), {}
    typer.echo(f"{output}: {len(names)} records")
    for name, why in wrong.items():
        typer.echo(f"{name}: {why}", err=True)
    if wrong or (compare and not as_committed(names, output, compare)):
        raise typer.Exit(1)


def _keep(records: Iterable[tuple[str, Record]], output: Path) -> list[str]:
    """Write each record as soon as it is made; return their names."""
    names = []
    for name, record in records:
        keep_record(record, output, name)
        names.append(name)
    return names


def _points(output: Path, only: list[str]) -> tuple[list[str], dict[str, str]]:
    """Trace points of baselines; return their names, and the reasons of those that failed."""
    points = load_points()
    require_among(only, [point.name for point in points], ("", "--only", "point"))
    chosen = tuple(point for point in points if not only or point.name in only)
    made = {p.name: r for p, r in zip(chosen, trace_points(chosen, output), strict=True)}
    failed = {n: f"{r.status}: {r.reason}" for n, r in made.items() if r.status != "ok"}
    return list(made), failed
