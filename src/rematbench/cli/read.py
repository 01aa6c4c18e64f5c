"""The command `read`: the job of a training package's files as a `simulate` command."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace
from typer import Argument, Option

from rematbench.cli.options import takes_facts
from rematbench.cli.targets import need_folder
from rematbench.evidence.published.row_cases import recompute_method
from rematbench.foreign.job import FileJob, file_job
from rematbench.foreign.packages import read_files
from rematbench.foreign.reading import Reading
from rematbench.host.console import CommandError
from rematbench.host.table import grouped
from rematbench.plugins.discover import discover


@takes_facts("It replaces the files' value.")
def read(  # every option is a parameter
    facts: dict[str, Any],
    files: Annotated[
        list[Path], Argument(metavar="FILE...", help="Launch script, JSON, YAML or TOML.")
    ],
    vocab: Annotated[
        int | None, Option(min=1, metavar="V", help="Size of the vocabulary in tokens.")
    ] = None,
    method: Annotated[
        str, Option(metavar="METHOD", help="Method in place of the files' recomputation.")
    ] = "",
    output: Annotated[
        Path | None,
        Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Folder for model and stack files (default: the folder of the first FILE).",
        ),
    ] = None,
    variables: Annotated[
        list[str] | None, Option("--set", metavar="NAME=VALUE", help="Set an environment variable.")
    ] = None,
    run: Annotated[bool, Option("--run", help="Also run the command.")] = False,
    anyway: Annotated[
        bool, Option("--anyway", help="Run the command without the keys that are unknown.")
    ] = False,
) -> None:
    """Read the files of a training job and print the equal `simulate` command.

    FILE: a script with a launch line of Megatron or of a Hugging Face trainer (Transformers, TRL,
    LLaMA-Factory, ms-swift, OpenRLHF, verl), a DeepSpeed JSON, a YAML of accelerate, TRL,
    LLaMA-Factory, axolotl or nanotron, a TOML of torchtitan, and the model's config.json.  Nothing
    is executed.  Options replace values of the files.  A key that is neither read nor known to be
    without effect stops --run.

    \b
    Example:
      rematbench read train.yaml ds_z3.json config.json --cluster h100-80gb --gpus 8 --run
    """
    if wrong := [text for text in variables or () if "=" not in text]:
        raise CommandError(f"--set {wrong[0]}: expected NAME=VALUE")
    reading = read_files(files, dict(text.split("=", 1) for text in variables or ()))
    given = {**facts, "vocab": vocab}
    job = _named(file_job(reading, given, method, files[0].stem))
    output = output or files[0].parent
    _write(job, output)
    _print(job, reading, output)
    if not run:
        return
    if reading.refused:
        raise CommandError(f"not run: {'; '.join(_grouped(reading.refused))}")
    if reading.unknown and not anyway:
        keys = ", ".join(dict.fromkeys(reading.unknown))
        raise CommandError(
            f"not run, because keys are unknown: {keys} (--anyway runs the command without them)"
        )
    if job.missing:
        raise CommandError(f"not run: no file gives {', '.join(job.missing)}")
    from rematbench.cli.app import command_line  # noqa: PLC0415  # app imports this module

    command_line()(["simulate", *_words(job, output), "--notes"], standalone_mode=False)


def _named(job: FileJob) -> FileJob:
    """The job with the method that a published word, such as `selective(op)`, stands for."""
    name, settings = recompute_method(job.method, discover([]))
    words = tuple(
        f"{key}={','.join(map(str, value)) if isinstance(value, list | tuple) else value}"
        for key, value in settings.items()
    )
    return replace(job, method=name, settings=(*job.settings, *words))


def _write(job: FileJob, output: Path) -> None:
    if job.files:
        need_folder("-o", output)
    for name, text in job.files.items():
        (output / name).write_text(text, encoding="utf-8")
        typer.echo(f"wrote {output / name}")


def _words(job: FileJob, output: Path) -> list[str]:
    return [str(output / word) if word in job.files else word for word in job.words]


def _grouped(lines: list[str]) -> list[str]:
    """The lines `key: reason`; lines with the same reason become one line."""
    parts = (line.partition(": ") for line in dict.fromkeys(lines))
    keys = grouped((reason or key, key) for key, _, reason in parts)
    return [
        reason if names == [reason] else f"{', '.join(names)}: {reason}"
        for reason, names in keys.items()
    ]


def _print(job: FileJob, reading: Reading, output: Path) -> None:
    typer.echo(f"rematbench simulate {shlex.join(_words(job, output))}")
    if job.missing:
        typer.echo(f"not in the files: {', '.join(job.missing)}")
    for kind, lines in (
        ("not modelled", reading.refused),
        ("note", reading.notes),
        ("assumes", reading.assumed),
    ):
        for line in _grouped(lines):
            typer.echo(f"{kind}: {line}")
    if reading.unknown:
        typer.echo(f"unknown keys, not read: {', '.join(dict.fromkeys(reading.unknown))}")
    if reading.ignored:
        typer.echo(f"no effect on bytes or time: {', '.join(dict.fromkeys(reading.ignored))}")
