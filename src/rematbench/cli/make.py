"""The command `make`: targets of the workflow."""

from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.host.console import CommandError, align_left, console, grid, plain
from rematbench.paper.targets import find_target, targets


def make(
    paths: Annotated[
        list[str] | None, Argument(metavar="[TARGET..]", help="Files to make (see --list).")
    ] = None,
    every: Annotated[bool, Option("--list", help="List all targets with their inputs.")] = False,
) -> None:
    """Make files of results/ whose inputs exist; Snakemake also makes missing inputs.

    \b
    Example:
      rematbench make --list
      rematbench make results/paper/tables/searched_layouts.csv
    """
    if every:
        shown = align_left(grid("target", "inputs"), 0, 1)
        for target in targets():
            shown.add_row(plain(target.outputs[0]), plain(" ".join(target.inputs.values())))
        console().print(shown)
    elif not paths:
        raise CommandError("give a TARGET, or use --list")
    chosen = [find_target(path) for path in paths or ()]
    once = {(target.name, *values.items()): (target, values) for target, values in chosen}
    for target, values in once.values():  # several files may belong to one target
        typer.echo(target.make(values))
