"""The command `measure-gpu`: all measurements of one GPU in one command."""

import math
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from rematbench.cli.real import need_gpu, need_torch
from rematbench.cli.targets import Only, Output, need_folder
from rematbench.host.console import CommandError, console, grid, left, plain
from rematbench.spec.paths import data_dir
from rematbench.worlds.gpu import LIMITS, ON_DEMAND, PARTS, GpuAsked, measure
from rematbench.worlds.gpu_checks import Summary

SuiteFile = Annotated[
    Path | None, Option(metavar="SUITE.yaml", help="Problems (default: config/gpu.yaml).")
]
Parts = Annotated[
    list[str] | None,
    Option(
        metavar="PART",
        help=f"Only some of {', '.join(LIMITS)}; or {', '.join(ON_DEMAND)}: real packages.",
    ),
]
Where = Annotated[
    Literal["cuda", "cpu"], Option(help="cpu: to try it out; its seconds mean nothing.")
]


def measure_gpu(
    output: Output,
    suite: SuiteFile = None,
    part: Parts = None,
    only: Only = None,
    device: Where = "cuda",
    inside: Annotated[bool, Option("--inside", hidden=True)] = False,
) -> None:
    """Measure on one GPU, in less than ten minutes: gradients under real streams, live bytes and
    the allocator's peak beside the ledger, step time beside a hand-written loop, copies beside
    matrix products.

    Each part is a process with a time limit of its own, and writes what it has at once: a crash of
    one loses nothing of the others.  DIR gets `records/` (one for each cell, as `execute` writes
    them), `steps.json`, `copies.json`, on demand `agreement/` and `baselines/`, a log of each part
    and `summary.json`, written again after each part.  What these parts left there before goes
    first; what other parts left stays and counts.  Exit code 1 unless every part ended well, every
    cell asked for has a record, and every claim holds.

    \b
    Example:
      rematbench measure-gpu -o results/measured/gpu
    """
    need_torch()
    names = part or list(LIMITS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise CommandError(f"--part {unknown[0]}: one of {', '.join(PARTS)}")
    source = suite or data_dir("config") / "gpu.yaml"
    asked = GpuAsked(suite=source, output=output, device=device, only=tuple(only or ()))
    asked.names("")  # an unreadable suite or method ends the command here
    if inside:
        for name in names:
            PARTS[name](asked)
        return
    need_gpu(device)
    need_folder("-o", output)
    summary = measure(names, asked, lambda text: typer.echo(text, err=True))
    _show(summary, output)
    if not summary.sound:
        raise typer.Exit(1)


def _show(summary: Summary, output: Path) -> None:
    words = {True: "yes", False: "NO", None: "not known"}
    table = left(grid("claim", "holds", "numbers"), 0, 2)
    for finding in summary.findings:
        table.add_row(plain(finding.claim), words[finding.holds], plain(finding.text))
    console().print(table)
    for ran in summary.parts:
        if ran.status != "ok":
            typer.echo(
                f"{ran.part}: {ran.status}: {ran.reason} ({output / ran.part}.log)", err=True
            )
    seconds = math.fsum(ran.seconds for ran in summary.parts)
    typer.echo(f"{output}: {seconds:.0f} s on {summary.device}")
