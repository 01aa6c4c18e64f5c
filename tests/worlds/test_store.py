"""Leases and records under kills: whole or absent, one holder at a time."""

import multiprocessing as mp
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from rematbench.worlds.records import store as module
from rematbench.worlds.records.store import Holder, Store, start_time, this_holder

ELSEWHERE = Holder(host="elsewhere", boot="other", pid=1, started=1)


def lease(folder: Path, number: int, holder: Holder, age_s: float = 0.0) -> Path:
    """A lease that another process left."""
    path = folder / f"cell.lease.{number}"
    path.write_bytes(msgspec.json.encode(holder))
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def test_a_record_is_kept_and_its_leases_go(tmp_path: Path) -> None:
    store = Store(tmp_path)
    held = store.claim("cell")
    assert held.attempt == 1
    assert store.commit(held, b"{}")
    assert store.finished("cell") == b"{}"
    assert store.claim("cell") is None
    assert [path.name for path in tmp_path.iterdir()] == ["cell.json"]


def test_a_live_holder_is_left_alone(tmp_path: Path) -> None:
    first, second = Store(tmp_path), Store(tmp_path)
    assert first.claim("cell") is not None
    assert second.claim("cell", wait=False) is None


def test_a_dead_process_of_this_machine_counts_as_an_attempt(tmp_path: Path) -> None:
    gone = msgspec.structs.replace(this_holder(), pid=2**22 - 1, started=5)
    lease(tmp_path, 1, gone)
    held = Store(tmp_path).claim("cell", wait=False)
    assert held.attempt == 2


@pytest.mark.parametrize(("age_s", "alive"), [(0.0, True), (module.STALE_S + 5, False)])
def test_a_holder_elsewhere_lives_by_its_touch(tmp_path: Path, age_s: float, alive: bool) -> None:
    path = lease(tmp_path, 1, ELSEWHERE, age_s)
    assert Store(tmp_path).is_alive(path) is alive


@pytest.mark.parametrize(("answer", "alive"), [(True, True), (False, False), (None, True)])
def test_the_queue_knows_of_dead_jobs(tmp_path: Path, answer: bool | None, alive: bool) -> None:
    path = lease(tmp_path, 1, msgspec.structs.replace(ELSEWHERE, job_id="7"))
    assert Store(tmp_path, job_alive=lambda _: answer).is_alive(path) is alive


def test_a_requeued_job_knows_that_its_first_start_has_ended(tmp_path: Path) -> None:
    path = lease(tmp_path, 1, msgspec.structs.replace(ELSEWHERE, job_id="7"))
    assert not Store(tmp_path, job_id="7", job_alive=lambda _: True).is_alive(path)


def test_who_was_taken_over_cannot_overwrite(tmp_path: Path) -> None:
    said: list[str] = []
    late = Store(tmp_path, say=said.append)
    held = late.claim("cell")
    assert held is not None
    lease(tmp_path, 2, ELSEWHERE)  # someone believed it dead
    assert not late.commit(held, b"late")
    assert late.finished("cell") is None
    assert "another job took the lease" in said[0]


def test_an_unfinished_record_is_claimed_again(tmp_path: Path) -> None:
    store = Store(tmp_path, is_final=lambda data: data == b"done")
    held = store.claim("cell")
    assert held is not None
    store.commit(held, b"preempted")
    assert store.read("cell") == b"preempted"
    again = store.claim("cell", wait=False)
    assert again.attempt == 2
    store.commit(again, b"done")
    assert [path.name for path in tmp_path.iterdir()] == ["cell.json"]


def work(folder: Path, number: int) -> None:
    """Finish all cells, each with a mark per time that it was run."""
    store = Store(folder / "store")
    for cell in range(number):
        held = store.claim(f"cell{cell}")
        if held is not None:
            with (folder / f"calls{cell}").open("a") as calls:
                calls.write("x")
            time.sleep(0.005)
            store.commit(held, b"{" + b" " * 100_000 + b"}")


def test_processes_share_cells_and_run_none_twice(tmp_path: Path) -> None:
    context = mp.get_context("fork")
    workers = [context.Process(target=work, args=(tmp_path, 20)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [(tmp_path / f"calls{cell}").read_text() for cell in range(20)] == ["x"] * 20


def test_killed_writers_leave_whole_records(tmp_path: Path) -> None:
    """kill -9 at many moments, then one run to the end."""
    context = mp.get_context("fork")
    for delay in range(12):
        worker = context.Process(target=work, args=(tmp_path, 8))
        worker.start()
        time.sleep(0.004 * delay)
        os.kill(worker.pid or 0, signal.SIGKILL)
        worker.join()
        for path in (tmp_path / "store").glob("*.json"):
            assert path.stat().st_size == 100_002
    work(tmp_path, 8)
    assert len(list((tmp_path / "store").glob("*.json"))) == 8
    assert {path.suffix for path in (tmp_path / "store").iterdir()} == {".json"}


def test_start_time_tells_processes_apart() -> None:
    assert start_time(os.getpid()) == this_holder().started
    assert start_time(2**22 - 1) is None
