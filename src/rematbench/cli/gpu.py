"""The measurements of one GPU: their commands, the predictions before them, the tables after."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from msgspec.structs import replace
from typer import Argument, Option

from rematbench.cli.real import need_gpu, need_torch
from rematbench.cli.targets import Only, Output, need_folder
from rematbench.host.console import CommandError, console, rich_table
from rematbench.measure.layer_suite import HandCell, layer_cells, layer_names, load_layers
from rematbench.measure.parts.checks import SUMMARY, Summary, read_summary
from rematbench.measure.parts.run import ENDS_S, LIMITS, ON_DEMAND, PARTS, SUITES, GpuAsked, measure
from rematbench.measure.parts.searched import load_searched, search_all
from rematbench.measure.predictions import PREDICTIONS, predict, write_predictions
from rematbench.measure.records import (
    Prediction,
    Rate,
    Searched,
    Spent,
    Turn,
    by_cell,
    read_lines,
)
from rematbench.paper.tables.gpu import layer_rows, layers_table, rates_table, ratios_table
from rematbench.paper.tables.gpu_runtime import actions_table, checks_table
from rematbench.paper.tables.gpu_searched import (
    advice_rows,
    advice_table,
    searched_rows,
    searched_table,
)
from rematbench.spec.paths import data_dir
from rematbench.worlds.records.suite_cells import problem_of

SuiteFile = Annotated[
    Path | None, Option(metavar="SUITE.yaml", help="Problems (default: of each part in config/).")
]
Parts = Annotated[
    list[str] | None,
    Option(
        metavar="PART",
        help=f"Only some of {', '.join(LIMITS)}; or {', '.join(ON_DEMAND)}.",
    ),
]
SEARCHED = PREDICTIONS["searched"]
Where = Annotated[
    Literal["cuda", "cpu"], Option(help="cpu: to try it out; its seconds mean nothing.")
]


def measure_gpu(
    output: Output,
    suite: SuiteFile = None,
    part: Parts = None,
    only: Only = None,
    device: Where = "cuda",
    seconds: Annotated[
        float, Option(min=ENDS_S + 5.0, help="Of each part, at most (default: its own limit).")
    ] = math.inf,
    inside: Annotated[bool, Option("--inside", hidden=True)] = False,
) -> None:
    """Measure on one GPU, in less than ten minutes: gradients under real streams, live bytes and
    the allocator's peak beside the ledger, seconds of a step.

    Each part is a process with a time limit of its own, and writes what it has at once: a crash
    of one loses nothing of the others.  DIR gets `records/` (one for each cell, as `execute`
    writes them), on demand `baselines/`, `rates.jsonl`, `actions.jsonl`, `layers/` and `searched/`,
    a log of each part and `summary.json`, written again after each part.  What these parts left
    there before goes first (but `layers` and `searched` go on where they ended); what other parts
    left stays and counts, and `summary.json` keeps how they ended.  Exit code 1 unless every part
    ended well, every cell asked for has a record, and every claim holds (`rates`, `actions`,
    `layers` and `searched` make none).

    \b
    Example:
      rematbench measure-gpu -o results/measured/gpu
    """
    need_torch()
    names = part or list(LIMITS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise CommandError(f"--part {unknown[0]}: one of {', '.join(PARTS)}")
    asked = GpuAsked(
        suite=suite, output=output, device=device, only=tuple(only or ()), seconds=seconds
    )
    for name in names:
        asked.check(name)  # an unreadable suite or method ends the command here
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
        typer.echo("on a CPU: the seconds mean nothing")
    if not (ended.sound if claims else ended.ended):
        raise typer.Exit(1)


def predict_gpu(
    output: Output,
    suite: SuiteFile = None,
    part: Annotated[
        Literal["layers", "searched"], Option(help="The part of `measure-gpu` to predict.")
    ] = "layers",
    anew: Annotated[bool, Option("--anew", help="Replace predictions that say otherwise.")] = False,
    processes: Annotated[int, Option(min=1, max=64, help="Worker processes of a search.")] = 2,
) -> None:
    """Predict the steps that `measure-gpu --part layers` measures: seconds, and bytes allocated,
    reserved and pinned, into DIR/predictions.jsonl.  With --part searched search the suite's jobs
    first, each for devices of several sizes, and predict the best plans into DIR/searched.jsonl.
    Commit the file before the measurement, which takes no predictions of other constants or plans.

    \b
    Example:
      rematbench predict-gpu -o results/measured/gpu
    """
    need_folder("-o", output)
    found: list[Prediction] = []
    if part == "searched":
        found += search_all(load_searched(suite or _own(part)), processes)
    else:
        every = layer_cells(load_layers(suite or _own(part)))
        found += [predict(cell) for cell in every if not isinstance(cell, HandCell)]
    typer.echo(write_predictions(found, output / PREDICTIONS[part], anew=anew))


def gpu_tables(
    folder: Annotated[list[Path], Argument(metavar="DIR...", help="What measure-gpu wrote.")],
    output: Output,
    suite: Annotated[Path | None, Option(metavar="SUITE.yaml", help="That of the layers.")] = None,
) -> None:
    """Tables of `measure-gpu` folders: their claims; rates measured, predicted and published; steps
    and bytes measured and predicted; each method's speed over full recomputation, and both MFUs;
    plans that a search found, and what following it loses.
    Of a claim, a cell or a file that several folders have, the last folder's counts.

    \b
    Example:
      rematbench gpu-tables my-gpu -o my-gpu/tables
    """
    tables = []
    if found := _those_with(folder, SUMMARY):
        tables.append(checks_table({str(path): read_summary(path / SUMMARY) for path in found}))
    if found := _those_with(folder, "rates.jsonl"):
        tables.append(rates_table(read_lines(found[-1] / "rates.jsonl", Rate)))
    if found := _those_with(folder, "actions.jsonl"):
        tables.append(actions_table(_last_of_cells(found)))
    if rows := _layer_rows(folder, suite):
        tables += [layers_table(rows), ratios_table(rows)]
    if plans := searched_plans(_those_with(folder, SEARCHED)):
        tables += [advice_table(advice_rows(plans)), searched_table(plans)]
    if not tables:
        names = ", ".join(map(str, folder))
        raise CommandError(f"{names}: no {SUMMARY}, rates.jsonl, layers/ or searched/*.jsonl")
    need_folder("-o", output)
    for table in tables:
        table.write(output)
        if table.name != "gpu_rates":  # a hundred lines
            console().print(rich_table(table))
        typer.echo(f"{output / table.name}.md: {table.full_note}")


def _those_with(folders: list[Path], name: str) -> list[Path]:
    return [path for path in folders if (path / name).exists()]


def _turns(folder: Path, part: str) -> list[Turn]:
    files = sorted(folder.glob(f"{part}/*.jsonl"))
    return [turn for file in files for turn in read_lines(file, Turn)]


def searched_plans(folders: list[Path]) -> list[dict[str, Any]]:
    """The rows of all folders' searched plans; of a cell that several folders have, the last's."""
    found: dict[str, dict[str, Any]] = {}
    for path in folders:
        rows = searched_rows(read_lines(path / SEARCHED, Searched), _turns(path, "searched"))
        found |= {row["cell"]: row for row in rows}
    return list(found.values())


def _last_of_cells(folders: list[Path]) -> list[Spent]:
    """The lines of all cells whose actions were timed; of a cell that several folders have, those
    of the last folder."""
    found: dict[str, list[Spent]] = {}
    for path in folders:
        found |= by_cell(read_lines(path / "actions.jsonl", Spent))
    return [line for lines in found.values() for line in lines]


def _layer_rows(folders: list[Path], suite: Path | None) -> list[dict[str, Any]]:
    """The rows of all folders' turns in the suite's order; of a cell that several folders have, the
    last row that was measured, else the last."""
    turns = {path: _turns(path, "layers") for path in folders}
    if not any(turns.values()):
        return []
    asked = load_layers(suite or _own("layers"))
    found: dict[str, dict[str, Any]] = {}
    for path, own in turns.items():
        for row in layer_rows(asked, path, own) if own else ():
            if row["step_s"] or not found.get(row["cell"], {}).get("step_s"):
                found[row["cell"]] = row
    problems = [problem.name for problem in asked.problems]
    order = sorted(layer_names(asked), key=lambda name: problems.index(problem_of(name)))
    return [found[name] for name in order if name in found]


def _own(part: str) -> Path:
    return data_dir("config") / SUITES[part][0]


def _show(summary: Summary, output: Path, *, claims: bool) -> None:
    if claims:
        console().print(rich_table(checks_table({str(output): summary})))
    for ran in summary.parts:
        if ran.status != "ok":
            typer.echo(
                f"{ran.part}: {ran.status}: {ran.reason} ({output / ran.part}.log)", err=True
            )
    seconds = math.fsum(ran.seconds for ran in summary.parts)
    typer.echo(f"{output}: {seconds:.0f} s on {summary.device}")
