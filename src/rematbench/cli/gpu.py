"""The command `measure-gpu`: the measurements of one GPU, and the predictions before them."""

import math
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec.structs import replace
from typer import Option

from rematbench.cli.real import need_gpu, need_torch
from rematbench.cli.targets import Only, Output, need_folder
from rematbench.host.console import CommandError, console, rich_table
from rematbench.inputs.configfile import require_among
from rematbench.inputs.paths import data_dir
from rematbench.measure.layer_suite import HandCell, layer_cells, load_layers
from rematbench.measure.parts.checks import Summary
from rematbench.measure.parts.run import (
    ENDS_S,
    LIMITS,
    ON_DEMAND,
    PARTS,
    SUITES,
    GpuRequest,
    measure,
)
from rematbench.measure.parts.searched_plans import load_searched, search_all
from rematbench.measure.predicted_steps import PREDICTIONS, predict, write_predictions
from rematbench.measure.records import Prediction
from rematbench.paper.tables.gpu_checks import checks_table

SuiteFile = Annotated[
    Path | None,
    Option(
        metavar="SUITE.yaml",
        help="Suite file with the problems (default: the file of each part in config/).",
    ),
]
Parts = Annotated[
    list[str] | None,
    Option(
        metavar="PART", help=f"Run only this part: {', '.join(LIMITS)}, or {', '.join(ON_DEMAND)}."
    ),
]
Where = Annotated[
    Literal["cuda", "cpu"], Option(help="Device to run on; times measured on cpu mean nothing.")
]


def measure_gpu(  # noqa: PLR0913, PLR0917  # every option is a parameter
    output: Output,
    suite: SuiteFile = None,
    part: Parts = None,
    only: Only = None,
    device: Where = "cuda",
    seconds: Annotated[
        float,
        Option(
            min=ENDS_S + 5.0, help="Time limit of each part in seconds (default: the part's limit)."
        ),
    ] = math.inf,
    first: Annotated[
        bool,
        Option(
            "--predict", help="Only write predictions for `layers` or `searched`; needs no GPU."
        ),
    ] = False,
    anew: Annotated[
        bool, Option("--anew", help="Replace existing predictions that differ.")
    ] = False,
    processes: Annotated[int, Option(min=1, max=64, help="Worker processes of a search.")] = 2,
    inside: Annotated[bool, Option("--inside", hidden=True)] = False,
) -> None:
    """Measure on one GPU, in less than ten minutes: gradients under real streams, live bytes and
    the allocator's peak against the ledger, seconds of a step.

    Each part is a process with a time limit and writes each result at once, so a crash loses no
    other part.  DIR gets `records/` (a file for each cell, as `execute` writes it), a log of each
    part, `summary.json` (written again after each part) and, on demand, `baselines/`, `layers/`,
    `searched/`.  A part first deletes its earlier results, but `layers` and `searched` continue
    theirs; other parts keep their results and status.  Exit code 1 unless each part ended well,
    each requested cell has a record, and each claim holds (`layers` and `searched` make none).

    With --predict nothing is measured.  The steps of `layers` (seconds, and bytes allocated,
    reserved and pinned) are predicted into DIR/predictions.jsonl.  With --part searched, the
    suite's jobs are searched for devices of several sizes, and the best plans are predicted into
    DIR/searched.jsonl.  Commit the file first: a measurement refuses other constants or plans.

    \b
    Example:
      rematbench measure-gpu -o results/measured/gpu
    """
    if first:
        if part and part[0] not in PREDICTIONS:
            raise CommandError(
                f"--part {part[0]}: predictions exist only for {', '.join(PREDICTIONS)}"
            )
        need_folder("-o", output)
        _predict(part[0] if part else "layers", suite, output, anew=anew, processes=processes)
        return
    need_torch()
    names = part or list(LIMITS)
    require_among(names, [*PARTS], ("", "--part", "part"))
    asked = GpuRequest(
        suite=suite, output=output, device=device, only=tuple(only or ()), seconds=seconds
    )
    for name in names:
        asked.check(name)  # an unreadable suite stops the command before any part runs
    if inside:
        for name in names:
            PARTS[name](asked)
        return
    need_gpu(device)
    need_folder("-o", output)
    summary = measure(names, asked, lambda text: typer.echo(text, err=True))
    claims = any(name not in SUITES for name in names)
    ended = replace(summary, parts=tuple(ran for ran in summary.parts if ran.part in names))
    _show(ended, output, claims=claims)
    if device == "cpu":
        typer.echo("this ran on a CPU, so its times mean nothing")
    if not (ended.sound if claims else ended.ended):
        raise typer.Exit(1)


def _predict(part: str, suite: Path | None, output: Path, *, anew: bool, processes: int) -> None:
    found: list[Prediction] = []
    if part == "searched":
        found += search_all(load_searched(suite or _own(part)), processes)
    else:
        every = layer_cells(load_layers(suite or _own(part)))
        found += [predict(cell) for cell in every if not isinstance(cell, HandCell)]
    typer.echo(write_predictions(found, output / PREDICTIONS[part], anew=anew))


def _own(part: str) -> Path:
    return data_dir("config") / SUITES[part][0]


def _show(summary: Summary, output: Path, *, claims: bool) -> None:
    if claims:
        console().print(rich_table(checks_table({str(output): summary}).printed()))
    for ran in summary.parts:
        if ran.status != "ok":
            typer.echo(
                f"{ran.part}: {ran.status}: {ran.reason} ({output / ran.part}.log)", err=True
            )
    seconds = math.fsum(ran.seconds for ran in summary.parts)
    typer.echo(f"{output}: {seconds:.0f} s on {summary.device}")
