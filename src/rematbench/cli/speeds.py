"""`speeds`: the table of measured speed, from executed cells."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.sheet import read
from rematbench.cli.targets import need_folder
from rematbench.tables.speed import NAME, speed_table, timed

EXECUTED = ("problem", "engine", "method", "status", "record_key")


def speeds(
    executed: Annotated[Path, Argument(metavar="EXECUTED.csv", help="From collect-cells.")],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where it is written.")],
) -> None:
    """Write the table of measured speed (CSV, Markdown, LaTeX): seconds, MFU and bytes of executed
    cells beside the simulated ones, and gains within each engine.

    \b
    Example:
      rematbench speeds results/measure/executed.csv -o results/measure/tables
    """
    need_folder("-o", output)
    rows = read(executed, "EXECUTED.csv", columns=EXECUTED)
    speed_table(rows).write(output)
    typer.echo(f"{output / NAME}.md: {len(rows)} cells, {timed(rows)} with seconds of a GPU")
