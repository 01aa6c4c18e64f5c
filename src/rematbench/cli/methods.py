"""The command `methods`: a list of the methods, and the check of a file against the contract."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from rematbench.cli.targets import Methods
from rematbench.evaluate.method_contract import check_file
from rematbench.host.console import CommandError, align_left, console, grid, plain
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import MethodError, Registry

CHECK_S = 60.0
"""Limit of CPU seconds of a check; a plan for a tiny problem takes milliseconds."""


def methods(
    folder: Methods = None,
    check: Annotated[
        Path | None, Option(metavar="FILE.py", help="Check a file against the contract instead.")
    ] = None,
) -> None:
    """List the methods with their claims and parameters.

    --check runs the tests of the shipped methods on a file, on tiny problems and on top of every
    other method.  It prints a line per check, and ends with exit code 1 at the first failure.

    \b
    Example:
      rematbench methods
      rematbench methods --methods my-methods/
      rematbench methods --check my-methods/mine.py
    """
    registry = discover(folder or ())
    if check is not None:
        _check(check, registry)
        return
    table = align_left(grid("method", "claim", "parameters"), 1, 2)
    for entry in registry.methods.values():
        parameters = ", ".join(f"{key}={value}" for key, value in entry.parameters.items())
        table.add_row(entry.name, plain(entry.claim.partition(": ")[2]), plain(parameters))
    console().print(table)
    for path, reason in registry.broken.items():
        console(error=True).print(plain(f"unavailable: {path}: {reason}"))


def _check(path: Path, registry: Registry) -> None:
    if not path.is_file():
        raise CommandError(f"--check {path}: no such file")
    try:
        with _limited(path):
            for passed in check_file(path, registry):
                typer.echo(f"ok: {passed}")
                signal.setitimer(signal.ITIMER_PROF, CHECK_S)
    except MethodError as error:
        typer.echo(f"broken: {error}", err=True)
        raise typer.Exit(1) from error


@contextmanager
def _limited(path: Path) -> Iterator[None]:
    """MethodError where CHECK_S CPU seconds pass before the timer is set again."""

    def late(*_: Any) -> None:
        raise MethodError(f"{path}: a check took more than {CHECK_S:g} CPU seconds")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, CHECK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
