"""The command `compare`: every method and baseline for one job in one table."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Option

from rematbench.advise.compare.candidates import load_compare
from rematbench.advise.compare.compare import Comparing
from rematbench.advise.compare.judged import Order, judge, lines
from rematbench.advise.compare.would_fit import would_fit
from rematbench.cli.options import RunOptions, request, takes_problem
from rematbench.cli.ranking import Ranking, ShownTable
from rematbench.cli.targets import Json, need_file
from rematbench.evidence.bands import shipped
from rematbench.host.console import CommandError, console
from rematbench.host.table import write_sheet
from rematbench.paper.tables.comparison_plot import FORMATS, write_plot
from rematbench.worlds.packages.flags import Engines

Names = list[str] | None


@takes_problem
def compare(  # noqa: PLR0913, PLR0917  # an option of the command line each
    run: RunOptions,
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="FILE.csv", help="Also write every number.")
    ] = None,
    also: Annotated[
        Names, Option(metavar="METHOD", help="A further row, as memo:alpha=0.3 (repeatable).")
    ] = None,
    only: Annotated[
        Names, Option(metavar="METHOD", help="These rows and no others (repeatable).")
    ] = None,
    tokens: Annotated[
        float, Option(min=0.0, metavar="N", help="Tokens to train on: adds days.")
    ] = 0.0,
    price: Annotated[
        float, Option(min=0.0, metavar="P", help="Price of a GPU-hour: with --tokens, adds cost.")
    ] = 0.0,
    json: Json = False,
    plot: Annotated[
        Path | None,
        Option(metavar="FILE.png", help="Draw speed against headroom, and steps (pdf, svg too)."),
    ] = None,
    wide: Annotated[bool, Option("--wide", help="Every column, however long lines get.")] = False,
    limit: Annotated[int, Option(min=1, metavar="S", help="CPU seconds for one candidate.")] = 4,
    processes: Annotated[int, Option(min=1, help="Worker processes.")] = 2,
) -> None:
    """Compare all methods, their compositions and the baseline policies on one job.

    Those that fit come first, by tokens/s; a method that refuses says why below the table.  Every
    row's name can be given to `simulate`; the CSV and --json have the whole command.

    \b
    Example:
      rematbench compare --model llama-65b --cluster h800-80gb --system megatron-kwai
        --gpus 64 --seq-len 4096 --global-batch 256 --tp 4 --pp 4 --vpp 5 -o compare.csv
      rematbench compare --model llama-7b --cluster a800-80gb --gpus 8 --tp 2
        --seq-len 16384 --global-batch 32 --only keep_all --only memo --also memo:alpha=0.3
    """
    need_file("-o", output)
    need_file("--plot", plot)
    if plot is not None and plot.suffix.lower() not in FORMATS:
        raise CommandError(f"--plot {plot}: expected a file of {', '.join(FORMATS)}")
    order = Order(tokens=tokens, price=price)
    asked = request(run, told=True)
    config = load_compare()
    comparing = Comparing(
        asked.problem,
        asked.base,
        config,
        methods=run.methods or (),
        also=also or (),
        only=only or (),
        processes=processes,
        limit_s=limit,
    )
    engines = Engines(asked.problem)
    shown = ShownTable(asked=asked, engines=engines, order=order, share=config.shown_share)
    printed = Ranking(console(), shown, wide=wide)
    shipped()  # free here, while the workers' server imports its modules
    first = judge(comparing.quick(), asked.problem)
    if not json:
        printed.table(first)
    for entry in comparing.late():
        ended = judge(comparing.comparison(), asked.problem)
        if not json:
            printed.late([item for item in ended if item.entry.name == entry.name])
    found = comparing.comparison()
    items = judge(found, asked.problem)
    fits = any(entry.status == "ok" for entry in found.entries)
    changes = [] if fits else would_fit(asked.problem, found.entries, comparing.registry)
    rows = lines(items, asked.job, engines, order)
    if json:
        answer = {
            "job": asked.job.facts(),
            "rows": rows,
            "would_fit": changes,
            "unavailable": found.unavailable,
            "left_out": found.repeated,
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
    else:
        printed.notes(found, items, changes)
    if output is not None:
        write_sheet(output, [as_cells(row) for row in rows])
    if plot is not None:
        write_plot(rows, plot)


def as_cells(row: dict[str, Any]) -> dict[str, Any]:
    """A row as in the CSV file: empty for None, yes and no for booleans."""
    words = {True: "yes", False: "no"}
    return {
        key: "" if value is None else words[value] if isinstance(value, bool) else value
        for key, value in row.items()
    }
