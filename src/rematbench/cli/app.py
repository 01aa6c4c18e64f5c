"""The command line `rematbench COMMAND`.  Wrong input ends with one line and exit code 2."""

import importlib
import re
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
"""Errors of an unsound lowered plan: a bug in rematbench or in a method file, not wrong input."""


def _version(value: bool) -> None:
    if value:
        typer.echo(f"rematbench {__version__}")
        raise typer.Exit


def _help_all(context: typer.Context, value: bool) -> None:
    if value:
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
    """Choose an activation-memory method and a parallel layout: does it fit, and how fast is it?"""


COMMANDS = (
    *(
        "shipped.methods",
        "shipped.models",
        "shipped.clusters",
        "shipped.systems",
        "plan.plan",
        "plan.simulate",
        "compare.compare",
        "search.search",
    ),
    *("plan.timeline", "stages.stages", "baseline.flags", "doctor.doctor", "execute.execute"),
    *("execute.trace", "verify.verify", "sheet.predict", "validate.validate"),
    *("calibrate.calibrate", "read.read"),
)
"""The user's commands, except the group of baselines: module of this folder and function."""
WORKFLOW = (
    *("shipped.examples", "table.table", "run.run", "study.study", "matrix.matrix"),
    *("searches.searches", "report.report", "report.expect", "measure.measure"),
    *("gpu.measure_gpu", "cells.run_cells", "cells.cells", "cells.resume"),
)
"""Commands for Snakemake rules, `./bench` and Slurm jobs, and `examples`, which the last lines of
the help mention.  Only --help-all lists them."""
GROUP = "baseline"
WORKERS = {
    "compare": "rematbench.advise.compare.tuning",
    "search": "rematbench.advise.search.processes",
}
"""Modules that a command's worker processes import; this import starts before the command."""


def command_line(requested: str = "") -> typer.Typer:
    """The command line with only the requested command, or with all commands if there is no command
    of this name.  To import all commands takes longer than many commands run."""
    app = typer.Typer(
        name="rematbench",
        help=top.__doc__,
        epilog="Start with: rematbench examples DIR; rematbench methods; rematbench simulate "
        "--help.  For shell completion: rematbench --install-completion.  For the workflow and "
        "Slurm commands: rematbench --help-all",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(top)
    places = {word(place): place for place in (*COMMANDS, *WORKFLOW)}
    every = (*places, GROUP)
    for name in [requested] if requested in every else every:
        if name == GROUP:
            text = "Real packages: list, run, predict."
            app.add_typer(_load(f"{GROUP}.app"), name=GROUP, help=text)
        else:
            app.command(hidden=places[name] in WORKFLOW)(_load(places[name]))
    return app


def word(place: str) -> str:
    """A command's name on the command line."""
    return place.partition(".")[2].replace("_", "-")


def _load(place: str) -> Any:
    module, _, name = place.partition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def main() -> None:
    """Run a command; a wrong input becomes one line on stderr and exit code 2."""
    command = " ".join(["rematbench", *sys.argv[1:2]])
    try:
        requested = next(iter(sys.argv[1:]), "")
        if requested in WORKERS:
            importlib.import_module("rematbench.host.workers").start_server(WORKERS[requested])
        app = command_line(requested)
        code = app(prog_name="rematbench", standalone_mode=False)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        text = error.format_message()
        _fail(context.command_path if context else "rematbench", text + _our_option(text))
    except UserError as error:
        _fail(command, str(error))
    except UNSOUND as error:
        cause = "a bug in rematbench or in your method file"
        text = f"the plan's actions are unsound ({cause}): {type(error).__name__}: {error}"
        _fail(command, text)
    except BrokenPipeError:  # the reader of the pipe has ended, for example `head`
        sys.stderr.close()
        code = 0
    except OSError as error:  # for example a full disk or an unreadable folder
        _fail(command, str(error))
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer turns KeyboardInterrupt into this code
        _fail("rematbench", "interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _our_option(message: str) -> str:
    """A hint to the option here for an unknown option of Megatron; empty for other messages."""
    unknown = re.match(r"No such option:? '?--([\w-]+)", message)
    if unknown is None:
        return ""
    megatron = importlib.import_module("rematbench.spec.jobfiles.megatron")
    problemspec = importlib.import_module("rematbench.spec.problemspec")
    name = megatron.NUMBERS.get(unknown[1], "")
    fields = problemspec.ProblemSpec.__struct_fields__
    return f"; here it is {problemspec.flag(name)}" if name in fields else ""


def _fail(where: str, message: str, code: int = 2) -> None:
    text = " ".join(message.replace("Value error, ", "").split())
    sys.stderr.write(f"{where}: {text}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
