"""`rematbench verify` of a traced cell: as committed, different, or nothing traced; its cost."""

import importlib.util
import multiprocessing as mp
import resource
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from rematbench.worlds import traced
from rematbench.worlds.records.record import read_record, write_record
from rematbench.worlds.records.suite import load_suite
from rematbench.worlds.records.suite_cells import cells
from tests.campaigns import suite_text, tiny
from tests.typed import Ran, typed

ROOT = Path(__file__).resolve().parents[3]
TRACED = ROOT / "config" / "traced.yaml"
RECORDS = sorted((ROOT / "results" / "measured" / "traced").glob("*.json"))
"""One of every cell (tests/worlds): their names, without planning them."""
SUITE = suite_text([tiny("small", gpus=4, seq_len=64, global_batch=4, tp=2, pp=2)])
CELL = "small.full_recompute.0"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite, and beside it the record of one of its cells."""
    path = tmp_path_factory.mktemp("suite") / "suite.yaml"
    path.write_text(SUITE)
    (cell,) = cells(load_suite(path), [], [CELL])
    write_record(traced.run(cell), path.with_name(f"{CELL}.json"))
    return path


def verified(suite: Path, folder: Path) -> Ran:
    record = str(folder / f"{CELL}.json")
    return typed("verify", record, "--suite", str(suite), "--if-installed")


def test_a_cell_is_traced_to_the_same_record(suite: Path) -> None:
    said = verified(suite, suite.parent)
    assert (said.code, said.out) == (0, f"{CELL} (traced): every number equal\n")


def test_a_byte_of_difference_fails(suite: Path, tmp_path: Path) -> None:
    record = read_record(suite.with_name(f"{CELL}.json"))
    rank = replace(record.measured.ranks[0], state_bytes=record.measured.ranks[0].state_bytes + 1)
    changed = replace(record, measured=replace(record.measured, ranks=(rank,)))
    write_record(changed, tmp_path / f"{CELL}.json")
    said = verified(suite, tmp_path)
    assert said.code == 1
    assert "state_bytes" in said.out


def test_without_torch_the_line_says_so(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = verified(suite, suite.parent)
    assert (said.code, said.out) == (0, f"{CELL}: not run again without torch\n")


@pytest.mark.soak
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_rank_at_paper_scale_takes_less_than_a_minute_and_4_gb(path: Path) -> None:
    """Of one core's time; in a process of its own, because memory only grows."""
    with mp.get_context("spawn").Pool(1) as pool:
        status, seconds, peak = pool.apply(_cost, (path.stem,))
    assert status == read_record(path).status
    assert seconds < 60
    assert peak < 4 << 30


def _cost(name: str) -> tuple[str, float, int]:
    (cell,) = cells(load_suite(TRACED), [], [name])
    start = time.process_time()
    status = traced.run(cell).status
    seconds = time.process_time() - start
    return status, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
