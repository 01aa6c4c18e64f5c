"""Records under kills: whole or absent, and the first of a cell stays."""

import multiprocessing as mp
import os
import signal
import time
from pathlib import Path

from rematbench.worlds.records.store import Store


def test_the_first_record_stays_and_what_was_left_beside_it_goes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.read("cell") is None
    store.write("cell", b"first")
    (tmp_path / ".cell.run1").mkdir()
    (tmp_path / ".cell.run1" / "log").touch()
    (tmp_path / ".cell.json.host.7.tmp").touch()
    (tmp_path / ".cell2.run1").mkdir()
    store.write("cell", b"second")
    store.sweep("cell")
    assert store.read("cell") == b"first"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cell2.run1", "cell.json"]


def work(folder: Path, number: int) -> None:
    """Finish all cells, each with a mark per time that it was run."""
    store = Store(folder / "store")
    for cell in map(str, range(number)):
        if store.read(cell) is None:
            with (folder / f"calls{cell}").open("a") as calls:
                calls.write("x")
            time.sleep(0.005)
            store.write(cell, b"{" + b" " * 100_000 + b"}")
        store.sweep(cell)


def test_killed_writers_leave_whole_records(tmp_path: Path) -> None:
    """kill -9 at many moments, then one run to the end: what was finished is not run again."""
    context = mp.get_context("fork")
    finished: dict[str, int] = {}
    for delay in range(12):
        worker = context.Process(target=work, args=(tmp_path, 8))
        worker.start()
        time.sleep(0.004 * delay)
        os.kill(worker.pid or 0, signal.SIGKILL)
        worker.join()
        for path in (tmp_path / "store").glob("*.json"):
            assert path.stat().st_size == 100_002
            assert finished.setdefault(path.name, path.stat().st_ino) == path.stat().st_ino
    work(tmp_path, 8)
    assert {path.suffix for path in (tmp_path / "store").iterdir()} == {".json"}
    assert len(list((tmp_path / "store").iterdir())) == 8
