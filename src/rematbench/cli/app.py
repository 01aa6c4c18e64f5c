"""The command line: `rematbench COMMAND`.  Errors of a person are one line and exit code 2."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option, TyperException
from typer.core import TyperGroup

from rematbench import __version__
from rematbench.cli import baseline, cells, tables
from rematbench.cli.calibrate import calibrate, validate
from rematbench.cli.compare import compare
from rematbench.cli.doctor import doctor
from rematbench.cli.examples import examples
from rematbench.cli.execute import execute
from rematbench.cli.flags import flags
from rematbench.cli.gpu import measure_gpu
from rematbench.cli.matrix import matrix
from rematbench.cli.measured import converge, measure
from rematbench.cli.plan import plan, simulate, timeline
from rematbench.cli.report import expect, report
from rematbench.cli.run import run
from rematbench.cli.search import search
from rematbench.cli.sheet import predict
from rematbench.cli.study import study
from rematbench.cli.systems import systems
from rematbench.cli.targets import Methods
from rematbench.cli.trace import trace
from rematbench.cli.verify import retrace, verify
from rematbench.cost.kernel_rates import RateError
from rematbench.host.console import CommandError, console, grid, left, plain
from rematbench.packages.process import BaselineError
from rematbench.plan import PlanError
from rematbench.plugins.contract import check_file
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import MethodError, Registry
from rematbench.program.check import CheckError
from rematbench.program.ledger import LedgerError
from rematbench.runs.record import RecordError
from rematbench.simulate.step import DeadlockError
from rematbench.spec.configfile import ConfigError
from rematbench.spec.layout import LayoutError

USER_ERRORS = (
    *(BaselineError, CommandError, ConfigError, LayoutError, MethodError, PlanError),
    *(RateError, RecordError),
)
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells have it."""
UNSOUND = (CheckError, DeadlockError, LedgerError)
"""What no plan's actions may do: nothing that a person typed is wrong."""

app = typer.Typer(
    name="rematbench",
    help="Which activation-memory strategy and parallel layout: will it fit, how fast is it?",
    epilog="Start with: rematbench examples DIR; rematbench methods; rematbench simulate --help.  "
    "Completion in the shell: rematbench --install-completion.  The commands of the workflow and "
    "of Slurm: rematbench --help-all",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rematbench {__version__}")
        raise typer.Exit


def _help_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        assert isinstance(context.command, TyperGroup)
        for command in context.command.commands.values():
            command.hidden = False
        typer.echo(context.get_help())
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    help_all: Annotated[
        bool, Option("--help-all", callback=_help_all, is_eager=True, help="List every command.")
    ] = False,
) -> None:
    """Which activation-memory strategy and parallel layout: will it fit, how fast is it?"""


def methods(
    folder: Methods = None,
    check: Annotated[
        Path | None, Option(metavar="FILE.py", help="Hold a file to the contract instead.")
    ] = None,
) -> None:
    """List the methods: what each claims, its parameters and its file.

    --check holds a method's file to what tests ask of the shipped ones, on tiny problems and on top
    of every other method; a line per check, and exit code 1 at the first that fails.

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
    table = left(grid("method", "claim", "parameters"), 1, 2)
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
        for passed in check_file(path, registry):
            typer.echo(f"ok: {passed}")
    except MethodError as error:
        typer.echo(f"broken: {error}", err=True)
        raise typer.Exit(1) from error


COMMANDS = (
    *(methods, systems, plan, simulate, compare, search, timeline, tables.stages, flags, doctor),
    *(execute, trace, verify, predict, validate, calibrate),
)
"""What a person uses, beside the group of baselines."""
WORKFLOW = (
    examples,
    *(run, study, matrix, report, expect, measure, measure_gpu, retrace, converge),
    *(tables.collect, tables.sheets, tables.tables, tables.claims, tables.speeds),
    *(tables.matrix_tables, tables.worlds, tables.curves),
    *(cells.submit_plan, cells.run_cells, cells.cells, cells.collect_cells),
    *(cells.retry, cells.settle, cells.resume),
)
"""What rules, `./bench` and jobs of Slurm call, and `examples`, which the help's last lines name;
listed by --help-all."""

for function in COMMANDS:
    app.command()(function)
app.add_typer(baseline.app, name="baseline", help="Real packages: list, run, trace, predict.")
for function in WORKFLOW:
    app.command(hidden=True)(function)


def main() -> None:
    """Run a command; turn what a person got wrong into one line on stderr and exit code 2."""
    command = " ".join(["rematbench", *sys.argv[1:2]])
    try:
        code = app(prog_name="rematbench", standalone_mode=False)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        _fail(context.command_path if context else "rematbench", error.format_message())
    except USER_ERRORS as error:
        _fail(command, str(error))
    except UNSOUND as error:
        whose = "a bug of rematbench, or of a method's file of yours"
        text = f"the plan's actions are unsound ({whose}): {type(error).__name__}: {error}"
        _fail(command, text)
    except BrokenPipeError:  # the reader of a pipe has gone, as `head` does
        sys.stderr.close()
        code = 0
    except OSError as error:  # a disk that is full, a folder that may not be read
        _fail(command, str(error))
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer turns KeyboardInterrupt into it
        _fail("rematbench", "interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(where: str, message: str, code: int = 2) -> None:
    text = " ".join(message.replace("Value error, ", "").split())
    sys.stderr.write(f"{where}: {text}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
