"""The command `examples`: example files for a new user."""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from rematbench.cli.targets import need_folder
from rematbench.host.console import CommandError
from rematbench.spec.paths import data_dir

COMMANDS = (
    "simulate full_recompute --model config.json --cluster my-cluster.yaml --gpus 8 "
    "--seq-len 8192 --global-batch 16 --tp 2",
    "compare --model config.json --cluster my-cluster.yaml --system my-stack.yaml --gpus 8 "
    "--seq-len 32768 --global-batch 16 --methods .",
    "methods --check recompute_mlp.py",
    "predict sheet.csv -o predictions.csv",
    "validate --rows sheet.csv",
)
"""Commands to try in the written folder."""


def examples(
    folder: Annotated[Path, Argument(metavar="DIR", help="The folder to write to.")],
) -> None:
    """Write an example of a model's config.json, a cluster, a stack, a sheet and a method.

    Existing files are not overwritten.

    \b
    Example:
      rematbench examples my-work
    """
    need_folder("DIR", folder)
    shipped = sorted(path for path in (data_dir("config") / "examples").iterdir() if path.is_file())
    there = [path.name for path in shipped if (folder / path.name).exists()]
    if there:
        raise CommandError(f"{folder} has {', '.join(there)} already; nothing was written")
    for path in shipped:
        shutil.copyfile(path, folder / path.name)
        typer.echo(f"wrote {folder / path.name}")
    typer.echo(f"in {folder}:")
    for words in COMMANDS:
        typer.echo(f"  rematbench {words}")
