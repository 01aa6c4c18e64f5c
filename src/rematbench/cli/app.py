"""The command line `rematbench COMMAND`.  Wrong input ends with one line and exit code 2."""

import ast
import importlib
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from typer import Option, TyperException
from typer.core import TyperCommand, TyperGroup

from rematbench import __version__
from rematbench.host.errors import UserError

INTERRUPTED = 130
"""The exit code after Ctrl-C, the same as in shells."""
UNSOUND = ("CheckError", "DeadlockError", "LedgerError")
"""Names of the errors that an unsound lowered plan raises (a bug in rematbench or in a method's
file).  The classes are not imported, because their modules load slowly."""


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
        "fit.fit",
        "compare.compare",
        "search.search",
    ),
    *("plan.timeline", "stages.stages", "baseline.flags", "doctor.doctor", "execute.execute"),
    *("execute.trace", "verify.verify", "sheet.predict", "sheet.row", "validate.validate"),
    *("calibrate.calibrate", "read.read"),
)
"""The user's commands, except the group of baselines: module of this folder and function."""
WORKFLOW = (
    *("shipped.examples", "table.table", "make.make", "expect.expect", "measure.measure"),
    *("gpu.measure_gpu", "cells.run_cells", "cells.cells"),
)
"""Commands for Snakemake rules, `./bench` and Slurm jobs, and `examples`, which the last lines of
the help mention.  Only --help-all lists them."""
GROUP = "baseline"
GROUP_HELP = "List, run and predict real packages."
WORKERS = {
    "compare": "rematbench.advise.compare.tuning",
    "search": "rematbench.advise.search.rounds",
}
"""The module that a command's worker processes need; its import starts before the command."""


class Late(TyperCommand):
    """A command whose module is imported when it runs.  Its line in the help is read from its file,
    because importing all commands would take longer than many commands run."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence of the command's docstring, within `limit` letters."""
        self.help = GROUP_HELP if self.name == GROUP else _docstring(PLACES[str(self.name)])
        return super().get_short_help_str(limit)


class Commands(TyperGroup):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name in (*PLACES, GROUP):
            hidden = PLACES.get(name) in WORKFLOW
            self.add_command(Late(name=name, hidden=hidden, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of the first word, imported now."""
        if args and args[0] in self.commands:
            self.add_command(_imported(args[0]), args[0])
        return super().resolve_command(ctx, args)


def command_line() -> typer.Typer:
    app = typer.Typer(
        name="rematbench",
        cls=Commands,
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
    return app


def word(place: str) -> str:
    return place.partition(".")[2].replace("_", "-")


PLACES = {word(place): place for place in (*COMMANDS, *WORKFLOW)}


def _imported(name: str) -> Any:
    place = f"{GROUP}.app" if name == GROUP else PLACES[name]
    module, _, attribute = place.partition(".")
    found = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    if name == GROUP:
        return typer.main.get_group(found)
    single = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    single.command(name)(found)
    return typer.main.get_command(single)


def _docstring(place: str) -> str:
    module, _, name = place.partition(".")
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return next((ast.get_docstring(f) or "" for f in functions if f.name == name), "")


def main() -> None:
    """Run a command; a wrong input becomes one line on stderr and exit code 2."""
    command = " ".join(["rematbench", *sys.argv[1:2]])
    try:
        requested = next(iter(sys.argv[1:]), "")
        if requested in WORKERS:
            importlib.import_module("rematbench.host.workers").start_server(WORKERS[requested])
        code = command_line()(prog_name="rematbench", standalone_mode=False)
    except TyperException as error:
        _mistyped(error, command)
    except UserError as error:
        _fail(command, str(error))
    except BrokenPipeError:  # `head`, for example, has read enough
        sys.stderr.close()
        code = 0
    except OSError as error:  # the disk is full, or a folder cannot be read
        _fail(command, str(error))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if type(error).__name__ not in UNSOUND:
            raise
        cause = "a bug in rematbench or in your method file"
        text = f"the plan's actions are unsound ({cause}): {type(error).__name__}: {error}"
        _fail(command, text)
    if code == INTERRUPTED:  # typer turns KeyboardInterrupt into this code
        _fail("rematbench", "interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _mistyped(error: TyperException, command: str) -> None:
    """Print what is wrong with the words of the command line; the help if there are none."""
    context, text = getattr(error, "ctx", None), error.format_message()
    if wrong := getattr(error.__cause__, "errors", None):  # pydantic's message lacks the value
        value = wrong()[0]["input"]
        text = re.sub(r"Input should be ([^,]*).*", lambda m: f"{value!r} must be {m[1]}", text)
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{text}\n")
        sys.exit(2)
    _fail(context.command_path if context else command, text.rstrip(".") + _meant(text))


OPTIONS_MEANT = {
    r"--(qlora|adapter|peft)\b": "adapters are --lora rank=R,targets=T,base=nf4",
    r"--precision.*'(mx)?fp8": "FP8 is a recipe of linears: --recipe fp8, fp8-block or mxfp8",
    r"--precision.*'(nv|mx)?fp4": "FP4 is a recipe of linears: --recipe nvfp4",
}
"""The option that was probably meant, by a pattern in the message about a wrong option or value."""


def _meant(message: str) -> str:
    """A hint at the option that was probably meant; empty without one."""
    reasons = (why for words, why in OPTIONS_MEANT.items() if re.search(words, message))
    return next((f"; {reason}" for reason in reasons), "")


def _fail(where: str, message: str, code: int = 2) -> None:
    text = " ".join(message.replace("Value error, ", "").split())
    sys.stderr.write(f"{where}: {text}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
