"""`python -m rematbench.slurm.rank METHOD ...`: one process of an executed cell, under torchrun."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer import Option

from rematbench.cli import USER_ERRORS
from rematbench.cli_run import RunOptions, request, takes_run
from rematbench.store import write_atomically


@takes_run
def rank(
    run: RunOptions,
    out: Annotated[Path, Option(help="Rank 0 writes the record here.")],
    steps: Annotated[int, Option(min=1)] = 3,
    timeout: Annotated[float, Option(min=1.0)] = 600.0,
) -> None:
    """Join the other processes, run the method's plan with them, write the record."""
    from rematbench.torch.joined import execute_joined  # noqa: PLC0415  # torch is optional

    asked = request(run)
    record = execute_joined(
        asked.problem,
        asked.method,
        asked.base,
        steps=steps,
        folder=out.parent,
        timeout_s=timeout,
    )
    if record is not None:
        write_atomically(out, msgspec.json.encode(record))


def main() -> None:
    """One line for what a person got wrong, as the command line gives it."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(rank)
    try:
        app(standalone_mode=False)
    except USER_ERRORS as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
