"""Which cells of a suite have a loss curve, and what is said of the others; no torch."""

import shutil
from functools import cache
from pathlib import Path

import pytest

from rematbench.cli.measure import measure
from rematbench.engine.lowering.lower import lower
from rematbench.host.console import CommandError
from rematbench.inputs.paths import data_dir
from rematbench.paper.tables.convergence import build
from rematbench.plan import Plan
from rematbench.plugins.registry import IDENTITY
from rematbench.worlds.records.suite import load_suite
from rematbench.worlds.records.suite_cells import Cell, cells
from rematbench.worlds.trained import select_cells
from tests.problems import all_methods

SUITE = data_dir("config") / "convergence.yaml"


@cache
def of_the_suite() -> tuple[list[Cell], list[str]]:
    return select_cells(cells(load_suite(SUITE), []))


def test_every_method_is_trained_once_and_keep_all_everywhere() -> None:
    trained, _ = of_the_suite()
    places = [cell.name.split(".", maxsplit=1) for cell in trained]
    others = [name for _, name in places if name != f"{IDENTITY}.0"]
    assert len(others) == len(set(others))
    problems = [problem.name for problem in load_suite(SUITE).problems]
    assert [problem for problem, name in places if name == f"{IDENTITY}.0"] == problems
    entries = all_methods().methods.items()
    plain = {name for name, entry in entries if not entry.moves_states}
    assert {cell.method.name for cell in trained} >= plain


def test_what_is_trained_does_something() -> None:
    for cell in of_the_suite()[0]:
        assert isinstance(cell.plan, Plan)
        base = lower(cell.problem.base_plan, cell.problem)
        assert (lower(cell.plan, cell.problem) == base) is (cell.method.name == IDENTITY)


def test_a_line_a_problem_says_what_is_left_out_and_why() -> None:
    trained, lines = of_the_suite()
    first, second, third = lines
    assert first.startswith(
        "bytes-one, left out: karma.0, mst.0, selective_recompute.0 (keep_all's program); "
        "lynx_heu.0, lynx_opt.0 (needs tp, cp or pp > 1: there is no communication to hide beside"
    )
    assert "pp_offload.0, pp_offload.1 (needs pp >= 3 so that" in first
    assert "mst+full_recompute.0 (trained on bytes-one)" in second
    assert "lynx_heu.0, lynx_opt.0 (trained on bytes-tp2-small)" in third
    every = cells(load_suite(SUITE), [])
    said = sum(line.count(".") for line in lines)
    assert len(trained) + said == len(every)


def test_a_cell_that_is_asked_for_by_name_is_trained_where_it_is_asked_for() -> None:
    (cell,), lines = select_cells(cells(load_suite(SUITE), [], ["bytes-pp4.full_recompute"]))
    assert cell.name == "bytes-pp4.full_recompute.0"
    assert lines == []


def test_a_refused_cell_is_said_before_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rematbench.cli.measure.need_torch", lambda: None)
    with pytest.raises(CommandError, match="has a plan of its own"):
        measure("convergence", tmp_path / "out", only=["bytes-one.lynx_heu"])
    assert capsys.readouterr().out.startswith("bytes-one, left out: lynx_heu.0 (needs tp, cp or")


def test_a_curve_without_keep_alls_of_its_problem_is_said(tmp_path: Path) -> None:
    records = Path(__file__).resolve().parents[2] / "results" / "measured" / "convergence"
    for name in ("bytes-one.keep_all.0", "bytes-pp4.pp_offload.1"):
        shutil.copy(records / f"{name}.json", tmp_path)
    with pytest.raises(CommandError, match="no record of keep_all on bytes-pp4 to compare with"):
        build(sorted(tmp_path.glob("*.json")))
