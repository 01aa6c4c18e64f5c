"""Whether a command can write where it is told to, tried before its work and not after."""

import tempfile
from pathlib import Path

from rematbench.host.console import CommandError


def need_folder(option: str, folder: Path) -> None:
    """Make a folder; CommandError if files cannot be written there."""
    _need(option, folder, folder)


def need_file(option: str, path: Path | None) -> None:
    """Make a file's folder, if a file is asked for; CommandError if it cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise CommandError(f"{option} {path}: cannot be written (Is a directory)")
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
