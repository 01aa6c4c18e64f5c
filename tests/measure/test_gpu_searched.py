"""Plans of a search that are predicted, made again from their predictions, and set in tables."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import rounds
from rematbench.host.console import CommandError
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.paths import data_dir
from rematbench.measure import predicted_steps
from rematbench.measure.parts import run
from rematbench.measure.parts import searched_plans as part
from rematbench.measure.parts.checks import PACKAGES_RUN, Finding, Summary
from rematbench.measure.parts.searched_plans import OneGpuJob, SearchedSuite
from rematbench.measure.records import Searched, Turn, append_line, read_lines
from rematbench.paper.tables.gpu_checks import checks_table
from rematbench.paper.tables.gpu_searched import (
    advice_rows,
    advice_table,
    searched_plans,
    searched_rows,
    searched_table,
)
from rematbench.plan import Plan
from tests.measure.test_gpu_layers import H100, turn

MEASURED = data_dir("config").parent / "results/measured"
RUNS = ("gpu-searched", "gpu-h100", "gpu-expandable")
JOB = OneGpuJob(
    name="tiny", why="test", model="tiny-llama-deep", cluster="h200-141gb-single",
    system="rematbench", seq_len=2048, global_batch=64, memory_gib=(3.0,), rows=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def lines() -> list[Searched]:
    suite = SearchedSuite(within=1e-3, jobs=(JOB,), beside=("full_recompute", "mst"))
    return list(part.search_all(suite, processes=1))


def test_the_first_plans_of_different_methods_are_predicted(lines: list[Searched]) -> None:
    *_, end = rounds(SearchRequest(spec=JOB.spec(3.0), within=0.0), processes=1)
    assert [line.place for line in lines] == [1, 2, 0]
    assert lines[0].step_s == pytest.approx(end.results[0].step_s)
    assert len({(line.method, line.spec.degrees.micro_batch) for line in lines}) == len(lines)
    assert [line.beside for line in lines] == [False, False, True]
    assert lines[0].step_s is not None
    assert lines[2].step_s is not None
    assert lines[0].step_s <= lines[2].step_s


def test_cells_are_those_that_were_predicted(lines: list[Searched], tmp_path: Path) -> None:
    path = tmp_path / predicted_steps.PREDICTIONS["searched"]
    predicted_steps.write_predictions(lines, path, anew=False)
    assert "unchanged" in predicted_steps.write_predictions(lines, path, anew=False)
    cells = part.searched_cells(path)
    assert [cell.name for cell in cells] == [line.cell for line in lines]
    assert predicted_steps.read_predictions(path, cells)[cells[0].name] == lines[0]
    assert [c.name for c in part.searched_cells(path, [lines[1].cell])] == [lines[1].cell]
    with pytest.raises(CommandError, match="has no cell named nothing"):
        part.searched_cells(path, ["nothing"])
    path.unlink()
    append_line(path, replace(lines[0], method="no_such_method"))
    with pytest.raises(CommandError, match="no_such_method"):
        part.searched_cells(path)


@pytest.mark.parametrize("run", RUNS)
def test_committed_predictions_make_the_plans_that_were_measured(run: str) -> None:
    """Another search may find other plans; what was measured stays what it was."""
    path = MEASURED / run / predicted_steps.PREDICTIONS["searched"]
    known = {line.cell: line for line in read_lines(path, Searched)}
    for cell in part.searched_cells(path):
        assert isinstance(cell.plan, Plan)
        assert predicted_steps.identity(cell)["plan_hash"] == known[cell.name].plan_hash


def test_a_suite_says_what_it_does_not_allow(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    shipped = (data_dir("config") / "gpu_searched.yaml").read_text()
    for old, new, said in (
        ("beside: [full_recompute", "beside: [full_recomput", "did you mean 'full_recompute'"),
        ("gpt-13b-8-layers", "gpt-13b-8-layer", "did you mean 'gpt-13b-8-layers'"),
        ("rows: 3", "row: 3", "row"),
        ("name: h200-64k", "name: h200-32k", "h200-32k"),
    ):
        assert old in shipped
        path.write_text(shipped.replace(old, new))
        with pytest.raises(ConfigError, match=said):
            part.load_searched(path)


def test_tables_say_what_following_the_search_loses(lines: list[Searched]) -> None:
    first, second, beside = lines
    turns: list[Turn] = [
        turn(first.cell, 1, 1.1, allocated_bytes=first.allocated_bytes),
        turn(second.cell, 1, 1.0, allocated_bytes=second.allocated_bytes),
        turn(beside.cell, 1, 2.2, allocated_bytes=beside.allocated_bytes),
    ]
    rows = searched_rows(lines, turns)
    assert [row["slower"] for row in rows] == pytest.approx([0.1, 0.0, 1.2])
    (row,) = advice_rows(rows)
    assert (row["lost"], row["gain"], row["measured"]) == pytest.approx((0.1, 1.0, 3))
    assert row["fastest"].startswith(second.method)
    note = advice_table([row]).note
    assert "on average 10.00 % of 1, at most 10.0 % (expected: at most 2 % on average)" in note
    note = advice_table([row, row | {"device": "another GPU", "lost": 0.0}]).note
    assert f"on average 5.00 % of 2 ({H100} 10.00 % of 1, another GPU 0.00 % of 1)" in note
    assert "none of the first plans" in note
    failed = [replace(turns[0], step_s=(), status="oom"), *turns[1:]]
    (row,) = advice_rows(rows := searched_rows(lines, failed))
    assert (row["lost"], row["gain"], row["status"]) == (1.0, None, "oom")
    assert "tiny at 3 GiB" in advice_table([row]).note
    assert f"Ran out of memory: {first.cell}" in searched_table(rows).note
    assert advice_rows(searched_rows(lines, turns[2:])) == []  # the first plan has had no turn


def test_plans_measured_on_several_cards_stand_together() -> None:
    rows = advice_rows(searched_plans([MEASURED / run for run in RUNS]))
    cards = ["h200"] * 12 + ["h100"] * 10 + ["h200"] * 2
    assert [row["job"].partition("-")[0] for row in rows] == cards
    assert len({row["device"] for row in rows}) == 2
    again = searched_plans([MEASURED / RUNS[1]] * 2)
    assert again == searched_plans([MEASURED / RUNS[1]])


def test_packages_runs_of_several_folders_stand_together() -> None:
    def summary(holds: bool | None, text: str) -> Summary:
        found = Finding(claim=PACKAGES_RUN, holds=holds, text=text)
        return Summary(written="2026-01-02T", device="a GPU", parts=(), findings=(found,))

    runs = {"x/one": summary(True, "a 1 s"), "x/two": summary(False, "b oom")}
    (row,) = checks_table(runs).rows
    assert (row["holds"], row["numbers"], row["run"]) == ("NO", "a 1 s; b oom", "one, two")
    (row,) = checks_table({**runs, "x/three": summary(None, "c")}).rows
    assert row["holds"] == "not known"
    silent = Summary(written="2026-01-02T", device="another GPU", parts=(), findings=())
    assert checks_table({**runs, "x/three": silent}).title == "Checks of the runtime on a GPU"


def test_one_package_runs_where_it_alone_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(run.package, "run", lambda problem, method, *_, **__: problem.layout)
    monkeypatch.setattr(run, "keep_record", lambda record, folder, name: ran.append(name))
    asked = run.GpuRequest(suite=None, output=tmp_path, device="cpu", only=("deepspeed-plain",))
    run.PARTS["baselines"](asked)
    assert ran == ["deepspeed-plain"]
    run.PARTS["baselines"](replace(asked, only=()))
    assert ran[1:] == ["megatron_core-none", "megatron_core-full", "deepspeed-none", ran[0]]
