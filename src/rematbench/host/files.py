"""Files that are whole or absent."""

import os
import socket
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a temporary name in the same folder, flush it to disk, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
