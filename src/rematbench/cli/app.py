"""The command line `rematbench COMMAND`.  A wrong input ends with one line and exit code 2."""

import importlib
import sys
from typing import Annotated, Any

import typer
from typer import Option, TyperException
from typer.core import TyperGroup

from rematbench import __version__
from rematbench.engine.program.profile import LedgerError
from rematbench.engine.simulate.op_level import DeadlockError
from rematbench.evaluate.proof import CheckError
from rematbench.host.errors import UserError

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as in shells."""
UNSOUND = (CheckError, DeadlockError, LedgerError)
"""Errors of an unsound lowered plan: a bug of rematbench or of a method file, not of a command
line."""


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


def top(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    help_all: Annotated[
        bool, Option("--help-all", callback=_help_all, is_eager=True, help="List every command.")
    ] = False,
) -> None:
    """Which activation-memory strategy and parallel layout: will it fit, how fast is it?"""


COMMANDS = (
    *(
        "methods.methods",
        "systems.systems",
        "plan.plan",
        "plan.simulate",
        "compare.compare",
        "search.search",
    ),
    *("plan.timeline", "stages.stages", "flags.flags", "doctor.doctor", "execute.execute"),
    *("trace.trace", "verify.verify", "sheet.predict", "validate.validate"),
    "calibrate.calibrate",
)
"""The user's commands, beside the group of baselines: modules of this folder and functions."""
WORKFLOW = (
    *("examples.examples", "table.table", "run.run", "study.study", "matrix.matrix"),
    *("searches.searches", "report.report", "report.expect", "measured.measure"),
    *("gpu.measure_gpu", "cells.run_cells", "cells.cells", "cells.resume"),
)
"""Commands that Snakemake rules, `./bench` and Slurm jobs call, and `examples`, which the help's
last lines name.  Only --help-all lists them."""
GROUP = "baseline"
WORKERS = {
    "compare": "rematbench.advise.compare.tuning",
    "search": "rematbench.advise.search.processes",
}
"""Modules that a command's worker processes import; this import starts before the command."""


def command_line(asked: str = "") -> typer.Typer:
    """The command line with the requested command alone, or with all commands if `asked` is none of
    them.  Importing all of them takes longer than many a command."""
    app = typer.Typer(
        name="rematbench",
        help="Which activation-memory strategy and parallel layout: will it fit, how fast is it?",
        epilog="Start with: rematbench examples DIR; rematbench methods; "
        "rematbench simulate --help.  Completion in the shell: rematbench --install-completion.  "
        "The commands of the workflow and of Slurm: rematbench --help-all",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(top)
    places = {word(place): place for place in (*COMMANDS, *WORKFLOW)}
    every = (*places, GROUP)
    for name in [asked] if asked in every else every:
        if name == GROUP:
            text = "Real packages: list, run, predict."
            app.add_typer(_found(f"{GROUP}.app"), name=GROUP, help=text)
        else:
            app.command(hidden=places[name] in WORKFLOW)(_found(places[name]))
    return app


def word(place: str) -> str:
    """A command's name on the command line."""
    return place.partition(".")[2].replace("_", "-")


def _found(place: str) -> Any:
    module, _, name = place.partition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def main() -> None:
    """Run a command; a wrong input becomes one line on stderr and exit code 2."""
    command = " ".join(["rematbench", *sys.argv[1:2]])
    try:
        asked = next(iter(sys.argv[1:]), "")
        if asked in WORKERS:
            importlib.import_module("rematbench.host.workers").start_server(WORKERS[asked])
        app = command_line(asked)
        code = app(prog_name="rematbench", standalone_mode=False)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        _fail(context.command_path if context else "rematbench", error.format_message())
    except UserError as error:
        _fail(command, str(error))
    except UNSOUND as error:
        whose = "a bug of rematbench, or of a method's file of yours"
        text = f"the plan's actions are unsound ({whose}): {type(error).__name__}: {error}"
        _fail(command, text)
    except BrokenPipeError:  # the reader of the pipe has ended, as `head` does
        sys.stderr.close()
        code = 0
    except OSError as error:  # for example a full disk or an unreadable folder
        _fail(command, str(error))
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer turns KeyboardInterrupt into this code
        _fail("rematbench", "interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(where: str, message: str, code: int = 2) -> None:
    text = " ".join(message.replace("Value error, ", "").split())
    sys.stderr.write(f"{where}: {text}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
