"""Committed records of the executed and traced worlds keep their promises; no torch needed."""

from functools import cache
from pathlib import Path

import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.evaluate.evaluation import program_bytes
from rematbench.paper.tables import worlds
from rematbench.plan import Plan
from rematbench.worlds.records.measured import RankMeasured
from rematbench.worlds.records.record import Record, plan_hash, read_record
from rematbench.worlds.records.suite import load_suite
from rematbench.worlds.records.suite_cells import Cell, cell_names, cells
from rematbench.worlds.run_records import as_executed

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
