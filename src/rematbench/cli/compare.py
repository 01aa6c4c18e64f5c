"""The command `compare`: every method and baseline for one job in one table."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Option

from rematbench.advise.compare.candidates import load_compare
from rematbench.advise.compare.comparison import Comparison, Order, table
from rematbench.advise.compare.would_fit import would_fit
from rematbench.cli.comparison_plot import FORMATS, write_plot
from rematbench.cli.options import RunOptions, request, takes_problem
from rematbench.cli.ranking import Ranking
from rematbench.cli.targets import Json, need_file
from rematbench.evidence.bands import shipped
from rematbench.host.console import CommandError, console
from rematbench.host.table import write_sheet

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

    Methods that fit come first, by tokens/s; the reasons of methods without a plan stand below the
    table.  `simulate` takes the name of every row; the CSV and --json have the whole command.

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
    asked = request(run, name_broken=False)
    comparison = Comparison(
        asked.job,
        load_compare(),
        methods=run.methods or (),
        also=also or (),
        only=only or (),
        processes=processes,
        limit_s=limit,
    )
    printed = Ranking(console(), comparison, order, wide=wide)
    shipped()  # free here, while the workers' server imports its modules
    comparison.quick()
    if not json:
        printed.table(comparison.results())
    for late in comparison.late():
        if not json:
            printed.rows([one for one in comparison.results() if one.method == late.method])
    results = comparison.results()
    fits = any(result.fits for result in results)
    changes = [] if fits else would_fit(asked.problem, results, comparison.registry)
    rows = table(results, order)
    if json:
        answer = {
            "job": asked.job.facts(),
            "rows": rows,
            "would_fit": changes,
            "unavailable": comparison.registry.broken,
            "left_out": comparison.left_out,
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
    else:
        printed.notes(results, changes)
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
