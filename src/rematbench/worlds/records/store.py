"""The store of finished cells by key, safe if processes are killed or two jobs run one cell.

A record is written under a temporary name and renamed, so a record is complete or absent.  The
first record of a cell stays: a key names the request and the code, so a second run of the cell
would only write the same numbers again.
"""

import shutil
from pathlib import Path

from rematbench.host.files import write_atomically


# Why: docs/decisions/worlds.md, Does Snakemake's lock guard executed cells?
class Store:
    """A folder of finished cells (`KEY.json`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def read(self, key: str) -> bytes | None:
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, key: str, data: bytes) -> None:
        """Write the record of a cell that is not finished; a finished cell keeps its record."""
        if self.read(key) is None:
            write_atomically(self.path(key), data)

    def sweep(self, key: str) -> None:
        """Remove temporary files and folders of a finished cell that killed processes left
        behind."""
        for path in self.folder.glob(f".{key}.*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
