"""Committed records of the executed and traced worlds keep their promises; no torch needed."""

import math
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from rematbench.cli.real import as_committed
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.evaluate.evaluation import program_bytes
from rematbench.paper.tables import worlds
from rematbench.plan import Plan
from rematbench.worlds.records.measured import Comparison, Measured, RankMeasured, relative
from rematbench.worlds.records.record import Record, plan_hash, read_record, write_record
from rematbench.worlds.records.store import Store
from rematbench.worlds.records.suite import load_suite
from rematbench.worlds.records.suite_cells import Cell, cell_names, cells
from rematbench.worlds.reruns import differences
from rematbench.worlds.run_records import as_executed
from tests.tables import tables

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "results" / "measured"
PATHS = sorted(
    path for world in ("executed", "traced") for path in (MEASURED / world).glob("*.json")
)
ALWAYS = ("keep_all", "full_recompute")
"""Methods whose plans no constant of the calibration changes: their records are never stale."""


@cache
def record(path: Path) -> Record:
    return read_record(path)


@cache
def names(world: str) -> list[str]:
    return cell_names(load_suite(ROOT / "config" / f"{world}.yaml"))


QUICK = [path for path in PATHS if "lynx" not in path.stem][::5]
"""Of plans that are not searched for, some: all are lowered again in the run of all tests."""


@cache
def current(world: str, *, quick: bool) -> dict[str, Cell]:
    """Cells with today's plans."""
    quick_names = {path.stem for path in QUICK if path.parent.name == world}
    only = [name for name in names(world) if (name in quick_names) == quick]
    suite = load_suite(ROOT / "config" / f"{world}.yaml")
    return {cell.name: cell for cell in cells(suite, [], only)}


def label(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("world", ["executed", "traced"])
def test_every_cell_has_a_record_and_every_record_a_cell(world: str) -> None:
    assert {path.stem for path in PATHS if path.parent.name == world} == set(names(world))


STATED = {"fp64": (1e-10, 1e-14), "fp32": (1e-6, 1e-6), "bf16": (1e-2, 1e-3)}
"""Bounds by precision of docs/executed.md: gradients of the first step, losses of every step."""


@pytest.mark.parametrize("path", PATHS, ids=label)
def test_bytes_are_the_ledgers_and_numbers_within_the_stated_bounds(path: Path) -> None:
    """Total peaks within 2 % in bf16, as simulated states are those of bf16 training; what splits
    no product is bitwise."""
    found = record(path)
    assert found.status in ("ok", "unsupported"), found.reason
    if found.measured is None:
        assert found.reason
        return
    assert found.measured.differing_actions == 0
    for rank in found.measured.ranks:
        assert rank.boundary_peak_bytes == rank.ledger_boundary_peak_bytes
        assert rank.host_peak_bytes == rank.ledger_host_peak_bytes
        assert found.spec.precision != "bf16" or abs(rank.peak_error) <= 0.02
    if found.world == "executed":
        other = found.measured.comparison
        assert other.lossless
        assert other.first_gradient_error is not None
        assert other.bitwise or "mst" in found.spec.method.split("+")
        first, losses = STATED[found.spec.precision]
        assert other.first_gradient_error <= first
        assert other.loss_error <= losses


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=() if p in QUICK else pytest.mark.full) for p in PATHS],
    ids=label,
)
def test_a_record_of_the_current_plan_has_the_current_ledger(path: Path) -> None:
    cell, found = current(path.parent.name, quick=path in QUICK).get(path.stem), record(path)
    if found.measured is None or cell is None or not isinstance(cell.plan, Plan):
        return
    if plan_hash(cell.problem, cell.plan) != found.plan_hash:
        stale = "rematbench measure writes it anew"
        assert found.spec.method not in ALWAYS, stale
        return
    program = lower(cell.plan, cell.problem)
    run = as_executed(cell.problem)
    simulated = program_bytes(run, cell.plan, lower(cell.plan, run))
    for rank in found.measured.ranks[:1]:
        expected = max(device for device, _ in live_bytes(program.ranks[rank.pp].actions()))
        assert rank.ledger_boundary_peak_bytes == expected
        assert rank.simulated_peak_bytes == simulated[rank.pp].device_peak


def test_the_table_is_made_without_torch(tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    said.write_text("one cell: every number equal\n")
    executed, traced = (sorted((MEASURED / name).glob("*.json")) for name in ("executed", "traced"))
    table, lossless = worlds.build(executed, traced, said)
    assert table.note.endswith("Run again for this table: one cell: every number equal.")
    assert "| keep_all" in table.markdown()
    rows = {row["precision"]: row for row in lossless.rows}
    assert 0.0 < rows["float64"]["gradient_error"] < 1e-10
    assert rows["bf16"]["cells"] > rows["bf16"]["bitwise"] > 0
    assert all(0.0 < rows["bf16"][f"{world}_error"] < 0.02 for world in ("traced", "executed"))


@pytest.mark.parametrize("problem", ["tp2-small", "tp2-pp2-small"])
@pytest.mark.parametrize("method", ["lynx_heu", "lynx_opt"])
def test_lynx_rebuilds_where_memory_is_short(problem: str, method: str) -> None:
    found = record(MEASURED / "executed" / f"{problem}.{method}.0.json").measured
    assert sum(rank.recompute_flop for rank in found.ranks) > 0


OFFLOADS = ("pp_offload", "balanced_checkpointing+pp_offload", "memo", "memo+mst", "karma")
REBUILDS = (
    *("full_recompute", "lynx_heu", "lynx_opt", "karma"),
    *("mst", "mst+full_recompute", "memo", "memo+mst"),
)
HOLDS_LESS = ("balanced_checkpointing", "selective_recompute")
"""Rebuild norms and elementwise products, which count as no FLOP."""
PLACES_STATES = ("optimizer_offload", "full_recompute+optimizer_offload")
LESS = ("boundary_peak_bytes", "state_bytes")
TRACED_WORK = [
    *((name, "offload_bytes") for name in OFFLOADS),
    *((name, "recompute_flop") for name in REBUILDS),
    *((name, "boundary_peak_bytes") for name in HOLDS_LESS),
    *((name, "state_bytes") for name in PLACES_STATES),
]


def traced_ranks(method: str) -> dict[tuple[str, str], RankMeasured]:
    """(problem, plan) -> the traced rank of a method."""
    found = [path for path in PATHS if path.parent.name == "traced"]
    return {
        (path.name.split(".")[0], record(path).plan_hash): ranks.fullest
        for path in found
        if record(path).spec.method == method and (ranks := record(path).measured) is not None
    }


@pytest.mark.parametrize(("method", "field"), TRACED_WORK)
def test_a_method_does_its_work_at_paper_scale(method: str, field: str) -> None:
    base = {problem: rank for (problem, _), rank in traced_ranks("keep_all").items()}
    done = [
        (getattr(rank, field), getattr(base[problem], field))
        for (problem, _), rank in traced_ranks(method).items()
    ]
    assert any(own < kept if field in LESS else own > 0 for own, kept in done)


def test_the_work_of_every_traced_method_is_asked_for() -> None:
    methods = {record(path).spec.method for path in PATHS if path.parent.name == "traced"}
    assert methods == {"keep_all", *(method for method, _ in TRACED_WORK)}


@pytest.mark.parametrize("problem", ["llama-175b-tp8-pp8", "llama-65b-figure7"])
@pytest.mark.parametrize("method", ["pp_offload", "balanced_checkpointing+pp_offload"])
def test_the_paper_s_jobs_are_traced_with_copies(problem: str, method: str) -> None:
    ranks = traced_ranks(method)
    assert any(rank.offload_bytes > 0 for (name, _), rank in ranks.items() if name == problem)


# -- records under kills: whole or absent, and the first of a cell stays ---------------------------


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


# -- errors beside what may be zero ----------------------------------------------------------------


def test_nothing_is_divided_by_zero() -> None:
    assert relative(0.5, 2.0) == 0.25
    assert relative(0.0, 0.0) == 0.0
    assert relative(1e-9, 0.0) == math.inf
    assert not relative(math.nan, 0.0) < 1.0


# -- a record measured again: every byte must be the committed one's, rounding may not be ----------


@cache
def executed() -> Record:
    return read_record(MEASURED / "executed" / "tp2.memo.1.json")


def changed(change: Callable[[Measured], Measured]) -> list[str]:
    """What a change of the measured numbers differs in."""
    found = executed().measured
    assert found is not None
    return differences(replace(executed(), measured=change(found)), executed())


def first_rank(found: Measured, **fields: int) -> Measured:
    return replace(found, ranks=(replace(found.ranks[0], **fields), *found.ranks[1:]))


def test_dates_and_hosts_are_no_difference() -> None:
    made = replace(executed().provenance, written="1970-01-01T00:00:00+00:00", platform="another")
    assert differences(replace(executed(), provenance=made), executed()) == []


@pytest.mark.parametrize("field", tables(__file__)["differences"])
def test_one_byte_is_a_difference(field: str) -> None:
    found = executed().measured
    value = getattr(found.ranks[0], field)
    lines = changed(lambda found: first_rank(found, **{field: value + 1}))
    assert lines == [f"rank 0: {field} {value + 1}, committed {value}"]


def test_a_plan_and_a_status_are_compared() -> None:
    other = replace(executed(), plan_hash="0", status="failed", reason="nan")
    assert [line.split()[0] for line in differences(other, executed())] == [
        "status",
        "reason",
        "plan_hash",
    ]
    assert differences(replace(executed(), measured=None), executed())


@pytest.mark.parametrize(("share", "differ"), [(1e-13, False), (1e-8, True)])
def test_losses_may_differ_by_rounding_only(share: float, differ: bool) -> None:
    def moved(found: Measured) -> Measured:
        return replace(found, losses=tuple(loss * (1 + share) for loss in found.losses))

    lines = changed(moved)
    assert bool(lines) is differ
    assert all(line.startswith("losses of step ") and "(bound " in line for line in lines)


def test_a_verdict_is_compared() -> None:
    def lossy(found: Measured) -> Measured:
        assert isinstance(found.comparison, Comparison)
        worse = replace(found.comparison, bitwise=False, gradient_error=1.0)
        return replace(found, comparison=worse)

    assert changed(lossy) == ["lossless False, committed True"]


def test_a_folder_is_compared_record_by_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    for folder in (new, old):
        write_record(executed(), folder / "a.json")
        write_record(executed(), folder / "b.json")
    assert as_committed(["a", "b"], new, old)
    found = executed().measured
    assert found is not None
    broken = replace(executed(), measured=first_rank(found, actions=1))
    write_record(broken, new / "b.json")
    assert not as_committed(["a", "b"], new, old)
    assert "b: rank 0: actions 1, committed" in capsys.readouterr().err
    (new / "b.json").unlink()
    assert not as_committed(["a", "b"], new, old)
    assert "b.json: cannot be read" in capsys.readouterr().err


def test_what_has_changed_is_said_where_a_number_has() -> None:
    spec = replace(executed().spec, cluster_hash="0", calibration_hash="1")
    assert differences(replace(executed(), spec=spec), executed()) == []
    said = differences(replace(executed(), spec=spec, status="failed"), executed())
    assert said[-1] == "changed since: cluster, calibration"
