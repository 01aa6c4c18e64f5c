"""Shared options of commands, and checks before the work that outputs can be written."""

import tempfile
from pathlib import Path
from typing import Annotated

from typer import Option

from rematbench.host.console import CommandError

Output = Annotated[Path, Option("-o", "--output", metavar="DIR", help="Folder to write.")]
Methods = Annotated[
    list[Path] | None,
    Option("--methods", metavar="DIR", help="Folder or file with more methods (repeatable)."),
]
Only = Annotated[
    list[str] | None, Option(metavar="PROBLEM[.METHOD]", help="Run only this cell (repeatable).")
]
Compare = Annotated[
    Path | None, Option(metavar="DIR", help="Exit 1 if a record differs from its copy in DIR.")
]
Predictions = Annotated[
    Path | None,
    Option(metavar="PRED.csv", help="Sheet with predictions to read instead of predicting again."),
]
Out = Annotated[
    Path | None,
    Option("-o", "--output", "--out", metavar="RECORD.json", help="Also write the record."),
]
Notes = Annotated[bool, Option("--notes", help="Print all notes instead of three.")]
Json = Annotated[bool, Option("--json", help="Print the answer as JSON.")]


def need_folder(option: str, folder: Path) -> None:
    """Create a folder; CommandError if files cannot be written there."""
    _need(option, folder, folder)


def need_file(option: str, path: Path | None) -> None:
    """CommandError if an output file cannot be written or its folder does not exist (a misspelt
    path must not create folders)."""
    if path is None:
        return
    if path.is_dir():
        raise CommandError(f"{option} {path}: cannot be written (Is a directory)")
    if not path.parent.exists():
        raise CommandError(f"{option} {path}: cannot be written (no folder {path.parent})")
    _need(option, path, path.parent)


def _need(option: str, target: Path, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"{option} {target}: cannot be written ({folder} is not a folder)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(f"{option} {target}: cannot be written ({error.strerror})") from error
